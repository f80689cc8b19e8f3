"""One ONNX file to one engine: the same calls for TensorRT and for TensorRT-RTX, whose Python packages have the same names inside.

TensorRT-RTX compiles for a named compute capability and needs no GPU. TensorRT compiles for the GPU that is present. Nothing is written to
stdout: all that the builder says is kept as text, since its plan is in it.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sinkring.exporter.builder_options import BuilderOptions
from sinkring.exporter.next_token import add_next_token
from sinkring.exporter.plan_kernels import read_kernels
from sinkring.runtime.backends.engine import MODULES, load_tensorrt
from sinkring.runtime.bfloat16 import BFLOAT16
from sinkring.runtime.errors import BuildError, DependencyError, UnsupportedError
from sinkring.runtime.manifest import Manifest

# Ampere: before it there is no bfloat16 in the hardware, and a builder says so in words of its own.
FIRST_BFLOAT16_SM = 80

# Called with (phase, steps done, steps in all).
Progress = Callable[[str, int, int], None]

# Smallest, best-tuned and largest shape of an input, as a TensorRT optimization profile takes them.
ShapeRange = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class CompiledEngine:
    """A serialized engine and what the builder said. `plan_text` lists the kernels; build_s is wall time in seconds."""

    engine: memoryview
    log: str
    plan_text: str
    build_s: float


def load_builder(target: str) -> ModuleType:
    """The Python module of `target`.

    Raises UnsupportedError for an unknown target, DependencyError when its package is not installed, does not load, or has another version.
    """
    if target not in MODULES:
        raise UnsupportedError(
            f"target {target!r}: engines are built for {', '.join(sorted(MODULES))}; ONNX graphs of other targets need no engine"
        )
    return load_tensorrt(target)


def supported_sms(trt: ModuleType) -> tuple[int, ...]:
    """Compute capabilities that TensorRT-RTX compiles for, as 10 x major + minor, ascending."""
    names = (name for name in dir(trt.ComputeCapability) if name.startswith("SM"))
    return tuple(sorted(int(name[2:]) for name in names if name[2:].isdigit()))


def check_sm(trt: ModuleType, target: str, sm: int) -> None:
    """Raises UnsupportedError for a compute capability that `target` cannot compile for here."""
    if target != "tensorrt-rtx":
        present = present_sm()
        if sm != present:
            raise UnsupportedError(
                f"sm={sm}: target {target!r} builds for the GPU that is present, which is sm={present}; build on the other GPU, "
                "or use target 'tensorrt-rtx'"
            )
    elif sm not in supported_sms(trt):
        have = ", ".join(str(known) for known in supported_sms(trt))
        raise UnsupportedError(f"sm={sm}: {target} {trt.__version__} compiles for {have}; name one of these")


def check_precision(manifest: Manifest, sm: int) -> None:
    """Raises UnsupportedError for a bundle that a GPU of `sm` has no arithmetic for."""
    if sm < FIRST_BFLOAT16_SM and BFLOAT16 in (manifest.dtype, manifest.cache_dtype):
        raise UnsupportedError(
            f"sm={sm}: the bundle has dtype {manifest.dtype} and {manifest.cache_dtype} caches, and GPUs have bfloat16 from "
            f"sm={FIRST_BFLOAT16_SM} on; export with --dtype fp16 for this one"
        )


def present_sm() -> int:
    """Compute capability of the first GPU, as 10 x major + minor. Raises DependencyError without a GPU or its driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DependencyError(f"target 'tensorrt' builds on the GPU it is for, and no NVIDIA driver is here ({error})") from None
    major, minor = ctypes.c_int(), ctypes.c_int()
    # 75 and 76 are CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h.
    codes = (cuda.cuInit(0), cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, 0), cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0))
    if any(codes):
        raise DependencyError(f"target 'tensorrt' builds on the GPU it is for, and the driver reports none (codes {codes})")
    return 10 * major.value + minor.value


def compile_engine(
    trt: ModuleType,
    target: str,
    onnx_path: Path,
    sm: int,
    profiles: Mapping[str, ShapeRange],
    progress: Progress | None = None,
    options: BuilderOptions = BuilderOptions(),  # noqa: B008  # frozen
    graph: bytes | None = None,
) -> CompiledEngine:
    """Parse `onnx_path` (external weights beside it), strongly typed, and compile it for `sm`.

    graph: a serialized graph in place of the file's, whose weights lie beside the file, too.
    profiles: shapes of every input with a dynamic axis. An exception raised by `progress` stops the build and comes out here.
    Raises BuildError when the parser refuses the graph or the builder gives up, with their own words.
    """
    started = time.monotonic()
    log = _make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not (parser.parse_from_file(str(onnx_path)) if graph is None else parser.parse(graph, str(onnx_path))):
        errors = "; ".join(_parser_error(parser.get_error(index)) for index in range(parser.num_errors))
        raise BuildError(
            f"{onnx_path.name}: {target} {trt.__version__} cannot parse the graph: {errors or log.errors()}; export again for {target}"
        )
    _allow_decomposing(trt, network)
    if options.next_token:
        add_next_token(trt, network)

    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    # One stream: a second one puts waits into every step and makes the step harder to capture as a CUDA graph.
    config.max_aux_streams = 0
    # It rounds the factors of fp32 products to 10 bits, which is not what the graph says.
    config.clear_flag(trt.BuilderFlag.TF32)
    if target == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
        # Fail here rather than at run time where an engine could not be captured as a CUDA graph.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    options.apply(trt, config)
    if profiles:
        profile = builder.create_optimization_profile()
        for name, (smallest, best, largest) in profiles.items():
            profile.set_shape(name, smallest, best, largest)
        config.add_optimization_profile(profile)
    monitor = _make_monitor(trt, progress) if progress is not None else None
    if monitor is not None:
        config.progress_monitor = monitor
    serialized = builder.build_serialized_network(network, config)
    if monitor is not None and monitor.stopped_by is not None:
        raise monitor.stopped_by
    if serialized is None:
        raise BuildError(f"{onnx_path.name}: {target} {trt.__version__} could not build for sm={sm}: {log.errors() or 'no reason given'}")
    options.keep_timings(config)
    engine = memoryview(serialized)
    plan_text = log.text() if read_kernels(log.text()) else _inspect(trt, log, engine)
    return CompiledEngine(engine, log.text(), plan_text, time.monotonic() - started)


def _allow_decomposing(trt: ModuleType, network: Any) -> None:
    """Head sizes without a fused kernel fall back to plain products; the ONNX attribute for it would break ONNX Runtime."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # The bindings hand out the base class; the attention is only reachable from the derived one.
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _inspect(trt: ModuleType, log: Any, engine: memoryview) -> str:
    """The plan from the engine itself, for builders that do not log it. Needs the GPU the engine is for; empty when it does not load."""
    loaded = trt.Runtime(log).deserialize_cuda_engine(engine)
    if loaded is None:
        return ""
    return str(loaded.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.ONELINE))


def _parser_error(error: Any) -> str:
    text = " ".join(str(error.desc()).split())
    with contextlib.suppress(Exception):  # not every version has the accessors of the node
        return f"node {error.node_name()!r} ({error.node_operator()}): {text}"
    return text


def _make_log(trt: ModuleType) -> Any:
    class Log(trt.ILogger):  # type: ignore[name-defined]
        """Keeps every message; prints none."""

        def __init__(self) -> None:
            super().__init__()
            self._lines: list[str] = []
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            self._lines.append(message)
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self._errors.append(message)

        def text(self) -> str:
            return "\n".join(self._lines)

        def errors(self) -> str:
            return "; ".join(self._errors[-3:])

    return Log()


def _make_monitor(trt: ModuleType, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        """Hands the builder's phases on. An exception must not cross the builder's C++ frames: it is kept, and the build is cancelled."""

        def __init__(self) -> None:
            super().__init__()
            self._steps: dict[str, int] = {}
            self.stopped_by: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            self._report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._report(phase_name, step + 1)
            return self.stopped_by is None

        def phase_finish(self, phase_name: str) -> None:
            self._report(phase_name, self._steps.get(phase_name, 0))

        def _report(self, phase: str, done: int) -> None:
            if self.stopped_by is not None:
                return
            try:
                progress(phase, done, self._steps.get(phase, 0))
            except BaseException as error:
                self.stopped_by = error

    return Monitor()
