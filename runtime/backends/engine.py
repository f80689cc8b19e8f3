"""One engine of a bundle: found for the GPU that is here, refused by name when it is stale or not what the manifest says, and loaded.

The same calls for TensorRT and TensorRT-RTX, whose Python packages have the same names inside.
"""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sinkring.runtime.backends.cuda import Device
from sinkring.runtime.contract import NEXT_TOKEN, check_contract, check_tensors, expected_tensors
from sinkring.runtime.device_sampling import DRAW, SAMPLING_INPUTS
from sinkring.runtime.errors import BundleError, DependencyError, DeviceError
from sinkring.runtime.manifest import PORTABLE_TARGET, Engine, Manifest, Role, Update

# backend and target -> its Python module; the extra of sinkring has the backend's name.
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx", PORTABLE_TARGET: "tensorrt"}
# The one version that a target is for, where it is for one: JetPack 6's.
VERSIONS = {PORTABLE_TARGET: "10.3"}
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32"}


# Graphs whose products are all float16, for the one GPU generation that TensorRT-RTX multiplies no float32 on.
TURING, TURING_TARGET = 75, "tensorrt-rtx-sm75"


def engine_target(manifest: Manifest, target: str, sm: int) -> str:
    """The target whose graphs an engine of `target` for `sm` is built from: Turing's own, where the bundle has them."""
    own = target == "tensorrt-rtx" and sm == TURING and any(graph.target == TURING_TARGET for graph in manifest.graphs)
    return TURING_TARGET if own else target


def load_tensorrt(target: str) -> ModuleType:
    """The Python module of `target`.

    Raises DependencyError when it is not installed, its libraries do not load, or it is of another version than the target's.
    """
    module, wanted = MODULES[target], VERSIONS.get(target)
    how = f"pip install 'sinkring[{target}]'" if wanted is None else f"TensorRT {wanted} comes with JetPack 6"
    try:
        loaded = import_module(module)
    except ImportError as error:
        raise DependencyError(f"{target!r} needs the Python package {module} ({error}): {how}") from None
    if wanted is not None and loaded.__version__.split(".")[:2] != wanted.split("."):
        raise DependencyError(
            f"{target!r} is for TensorRT {wanted}, and {module} is {loaded.__version__} here; use TensorRT {wanted} ({how}), or target "
            "tensorrt, which takes graphs of its own as well as these"
        )
    return loaded


class LoadedEngine:
    """An engine on the device with its one execution context, whose scratch memory comes from outside.

    Raises BundleError for an engine that is missing, stale, does not load, or whose tensors differ from the
    manifest's in name, type, shape or in where the caches are updated.
    """

    def __init__(self, trt: ModuleType, device: Device, bundle: Path, manifest: Manifest, role: Role, target: str) -> None:
        self._device = device
        self.update = manifest.graph(role, target).update
        found = find_engine(manifest, role, target, device.sm, trt.__version__, device.name)
        self.path = found.path
        self._log = make_log(trt)
        self._runtime = trt.Runtime(self._log)
        self.engine = self._runtime.deserialize_cuda_engine((bundle / found.path).read_bytes())
        if self.engine is None:
            raise BundleError(
                f"{found.path}: {target} {trt.__version__} cannot load it on {device.name}, sm={device.sm}: {self._log.last()}; "
                "build it again"
            )
        said = _read_report(bundle / found.report)
        self.most_top_k: int = said.get("sample_top_k") or int(NEXT_TOKEN in _names(self.engine))
        check_contract(found.path, said["contract"], manifest, self.update)
        _check_signature(self.engine, trt, found.path, manifest, role, self.update)
        self.scratch_bytes = int(self.engine.device_memory_size_v2)
        self.context = self.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self.context is None:
            raise DeviceError(f"{found.path}: no execution context on {device.name}: {self._log.last()}; close what else uses the GPU")

    def use_scratch(self, address: int, size_bytes: int) -> None:
        self.context.set_device_memory(address, size_bytes)

    def bind(self, name: str, address: int) -> None:
        if not self.context.set_tensor_address(name, address):
            raise DeviceError(f"{self.path}: {name!r} cannot be bound: {self._log.last()}")

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not self.context.set_input_shape(name, shape):
            raise DeviceError(f"{self.path}: input {name!r} does not take the shape {shape}: {self._log.last()}")

    def enqueue(self) -> None:
        """Put one run on the device's stream."""
        if not self.context.execute_async_v3(self._device.stream):
            raise DeviceError(f"{self.path}: the run was not accepted: {self._log.last()}; close the bundle and open it again")

    def capturable(self) -> bool:
        """What TensorRT-RTX says of it; TensorRT says nothing, and captures all that has no loops or sizes that depend on data."""
        ask = getattr(self.context, "is_stream_capturable", None)
        return ask is None or bool(ask(self._device.stream))

    def close(self) -> None:
        # In this order, and before the memory that they point to.
        del self.context, self.engine, self._runtime


def find_engine(manifest: Manifest, role: Role, target: str, sm: int, version: str, gpu: str) -> Engine:
    """The engine of `role` for this GPU and this version. Raises BundleError that says which there are, or why it is stale."""
    graph = manifest.graph(role, engine_target(manifest, target, sm))
    again = f"sinkring build BUNDLE --target {target}" + (f" --sm {sm}" if target == "tensorrt-rtx" else "")
    have = [engine for engine in manifest.engines if (engine.role, engine.target) == (role, target)]
    here = [engine for engine in have if engine.sm == sm]
    if not here:
        others = ", ".join(f"sm={engine.sm}" for engine in have) or "none"
        raise BundleError(f"the bundle has no {role} engine of {target} for sm={sm} ({gpu}), but {others}; build it: {again}")
    engine = here[-1]
    hashed = manifest.file(graph.path).sha256
    if (engine.graph_path, engine.graph_sha256) != (graph.path, hashed):
        raise BundleError(
            f"{engine.path}: is stale, it was built from {engine.graph_path} of sha256 {engine.graph_sha256[:12]}..., the bundle's {role} "
            f"graph is {graph.path} of {hashed[:12]}...; build it again: {again}"
        )
    if engine.builder_version != version:
        raise BundleError(
            f"{engine.path}: is stale, it was built by {target} {engine.builder_version}, here is {version}; build it again: {again}, or "
            f"install {target} {engine.builder_version}"
        )
    return engine


def _check_signature(engine: Any, trt: ModuleType, where: str, manifest: Manifest, role: Role, update: Update) -> None:
    modes = {name: engine.get_tensor_mode(name) for name in _names(engine)}
    for name in modes:
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise BundleError(
                f"{where}: {name!r} is read on the host, and all tensors are bound in device memory; export and build it again"
            )
    inputs, outputs = expected_tensors(manifest, role, update)
    if DRAW in modes:
        inputs |= dict.fromkeys(SAMPLING_INPUTS, ("int64", (manifest.batch,)))
    if NEXT_TOKEN in modes:
        outputs[NEXT_TOKEN] = ("int64", (manifest.batch, 1))
    for side, mode, expected in (("input", trt.TensorIOMode.INPUT, inputs), ("output", trt.TensorIOMode.OUTPUT, outputs)):
        check_tensors(where, "engine", side, {name: _tensor(engine, name) for name, its in modes.items() if its == mode}, expected)
    for state in manifest.states if update == "in_place" else ():
        alias = engine.get_aliased_input_tensor(state.updated)
        if alias != state.name:
            found = f"updated in {alias!r}" if alias else "a tensor of its own"
            raise BundleError(
                f"{where}: output {state.updated!r} is {found}, not {state.name!r} updated in place: every step would lose the cache; "
                "build it again from a graph that writes with TensorScatter"
            )
    if role == "prefill":
        for name, axis in ((manifest.input_name, 1), ("rows", 0)):
            smallest, _, largest = (tuple(dims)[axis] for dims in engine.get_tensor_profile_shape(name, 0))
            if smallest > 1 or largest < manifest.chunk:
                raise BundleError(
                    f"{where}: {name!r} takes {smallest} to {largest} tokens, the manifest's chunk is {manifest.chunk}; build it again"
                )


def _read_report(report: Path) -> dict[str, Any]:
    """What `build` says of the engine; `contract` is that of the graph it was built from."""
    try:
        said: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        contract = said["contract"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise BundleError(f"{report}: is no build report with a contract ({what}); build the engine again") from None
    return {**said, "contract": contract if isinstance(contract, dict) else {}}


def _names(engine: Any) -> list[str]:
    return [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]


def _tensor(engine: Any, name: str) -> tuple[str, tuple[int | None, ...]]:
    code = engine.get_tensor_dtype(name).name
    return DTYPES.get(code, code), tuple(None if size == -1 else int(size) for size in engine.get_tensor_shape(name))


def make_log(trt: ModuleType) -> Any:
    class Log(trt.ILogger):  # type: ignore[name-defined]
        """Keeps the last error; prints nothing."""

        def __init__(self) -> None:
            super().__init__()
            self._error = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self._error = " ".join(message.split())

        def last(self) -> str:
            return self._error

    return Log()
