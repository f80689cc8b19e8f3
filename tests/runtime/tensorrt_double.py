"""A stand-in for the `tensorrt_rtx` module whose engines run: an "engine" is a note of the ONNX file it stands for, run by ONNX Runtime.

Methods and properties are held against the real classes: a name that the real one does not have, or arguments that no documented overload
takes, fail. A run reads and writes the very addresses that were bound, on the double of the CUDA stream, and refuses what TensorRT
refuses: an unbound tensor, an update that is bound elsewhere than its cache, too little scratch, and a first run inside a capture.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.runtime.cuda_double import STREAM, CudaDouble

real = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")

SCRATCH_BYTES = {"decode": 5000, "prefill": 9000}
_TYPES = {
    onnx.TensorProto.FLOAT: ("FLOAT", np.float32),
    onnx.TensorProto.FLOAT16: ("HALF", np.float16),
    onnx.TensorProto.BFLOAT16: ("BF16", np.uint16),
    onnx.TensorProto.INT64: ("INT64", np.int64),
}
_ACCEPTED = {
    "str": str,
    "typing.SupportsInt": int,
    "tuple": tuple,
    "list": list,
    "typing_extensions.Buffer": (bytes, memoryview),
    "tensorrt_rtx_bindings.tensorrt_rtx.ExecutionContextAllocationStrategy": real.ExecutionContextAllocationStrategy,
}


def like(genuine: type) -> Callable[[type], type]:
    """Class decorator: each public name of the double must be one of `genuine`, and each call fit one of its documented signatures."""

    def checked(double: type) -> type:
        for name, member in list(vars(double).items()):
            if name.startswith("_"):
                continue
            original = inspect.getattr_static(genuine, name)  # AttributeError for a name that TensorRT does not have
            assert isinstance(member, property) == isinstance(original, property), f"{genuine.__name__}.{name}: method or property"
            if not isinstance(member, property):
                setattr(double, name, _fitting(member, name, _overloads(name, str(original.__doc__))))
        return double

    return checked


def _overloads(name: str, doc: str) -> list[list[tuple[str, bool]]]:
    """Of each signature in the docstring of a binding: the type of each argument after self, and whether it may be left out."""
    found = []
    for arguments in re.findall(rf"{name}\(self: [\w.]+(.*)\) ->", doc):
        parts = re.findall(r", (\w+): ((?:[^,=\[\]]|\[[^\]]*\])+)( = [^,]+)?", arguments)
        found.append([(kind.strip(), bool(default)) for _, kind, default in parts])
    assert found, f"{name}: no signature in its docstring: {doc[:200]}"
    return found


def _fitting(method: Callable[..., Any], name: str, overloads: list[list[tuple[str, bool]]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        fits = [
            len(arguments) <= len(kinds)
            and all(default for _, default in kinds[len(arguments) :])
            and all(isinstance(value, _ACCEPTED.get(kind, ())) for value, (kind, _) in zip(arguments, kinds, strict=False))
            for kinds in overloads
        ]
        assert any(fits), f"{name}{arguments}: fits none of {overloads}"
        return method(self, *arguments)

    return call


class TensorRtDouble:
    """Takes the place of the module. events: runs, and runs inside a capture, in turn. faults: what the engines say that is not so."""

    def __init__(self, cuda: CudaDouble, version: str = real.__version__) -> None:
        self.cuda, self.__version__ = cuda, version
        self.events: list[str] = []
        self.faults: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "Runtime":
            return functools.partial(Runtime, self)
        return getattr(real, name)


@like(real.Runtime)
class Runtime:
    def __init__(self, module: TensorRtDouble, log: Any) -> None:
        assert isinstance(log, real.ILogger)
        self._module, self._log = module, log

    def deserialize_cuda_engine(self, serialized: bytes) -> "Engine | None":
        if "does not load" in self._module.faults:
            self._log.log(real.ILogger.Severity.ERROR, "Target GPU SM 89 is not supported by this engine")
            return None
        note = json.loads(serialized)
        return Engine(self._module, note["role"], Path(note["onnx"]), note["next_token"])


@like(real.ICudaEngine)
class Engine:
    def __init__(self, module: TensorRtDouble, role: str, path: Path, next_token: bool) -> None:
        self._module, self._role = module, role
        graph = onnx.load(path, load_external_data=False).graph
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {tensor.name: tensor for tensor in graph.input}
        self._outputs = {tensor.name: tensor for tensor in graph.output}
        self._emulated = {"next_token"} if next_token else set()
        if next_token:
            batch = self._tensor("logits").shape.dim[0].dim_value
            added = onnx.helper.make_tensor_value_info("next_token", onnx.TensorProto.INT64, [batch, 1])
            self._outputs["next_token"] = added
        self._aliases = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "TensorScatter"}

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH_BYTES[self._role]

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        return real.TensorIOMode.INPUT if name in self._inputs else real.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(real.DataType, _TYPES[self._tensor(name).elem_type][0])

    def get_tensor_shape(self, name: str) -> Any:
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in self._tensor(name).shape.dim]
        return real.Dims(self._module.faults.get(("shape", name), dims))

    def get_tensor_location(self, name: str) -> Any:
        return getattr(real.TensorLocation, self._module.faults.get(("location", name), "DEVICE"))

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Any]:
        assert profile == 0
        most = self._module.faults.get("most tokens", 1 << 20)
        shapes = [[size if dim == -1 else dim for dim in self.get_tensor_shape(name)] for size in (1, most, most)]
        return [real.Dims(shape) for shape in shapes]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._module.faults.get(("alias", name), self._aliases.get(name))

    def create_execution_context(self, strategy: Any) -> "Context":
        assert strategy == real.ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self)

    def _tensor(self, name: str) -> Any:
        return (self._inputs.get(name) or self._outputs[name]).type.tensor_type


@like(real.IExecutionContext)
class Context:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._module, self._cuda = engine._module, engine._module.cuda
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._scratch_bytes = 0
        self._warm = False

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0
        self._addresses[name] = memory
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        fixed = tuple(self._engine.get_tensor_shape(name))
        self._shapes[name] = shape
        return len(fixed) == len(shape) and all(dim in (-1, size) for dim, size in zip(fixed, shape, strict=True))

    def set_device_memory(self, memory: int, size: int) -> None:
        self._cuda.bytes_at(memory, size)
        self._scratch_bytes = size

    def is_stream_capturable(self, stream: int) -> bool:
        return stream == STREAM and "not capturable" not in self._module.faults

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == STREAM
        capturing = self._cuda.captured is not None
        self._module.events.append(f"{'capture' if capturing else 'run'} {self._engine._role}")
        if self._scratch_bytes < self._engine.device_memory_size_v2 or (capturing and not self._warm):
            return False
        self._warm = True
        for name, cache in self._engine._aliases.items():
            if self._addresses[name] != self._addresses[cache]:
                return False
        shapes = {name: self._shape(name) for name in self._engine._inputs}
        length = {"T": shapes["tokens" if "tokens" in shapes else "embeddings"][1], "N": shapes.get("rows", (1,))[0]}
        bound = SimpleNamespace(inputs=[], outputs=[])
        for tensors, binds in ((self._engine._inputs, bound.inputs), (self._engine._outputs, bound.outputs)):
            for name in tensors:
                dims = self._engine._tensor(name).shape.dim
                shape = tuple(dim.dim_value if dim.HasField("dim_value") else length[dim.dim_param] for dim in dims)
                dtype = _TYPES[self._engine._tensor(name).elem_type][1]
                self._cuda.bytes_at(self._addresses[name], int(np.prod(shape)) * np.dtype(dtype).itemsize)
                kind = onnx.TensorProto.BFLOAT16 if dtype == np.uint16 else dtype
                binds.append((name, "cpu", 0, kind, shape, self._addresses[name]))
        self._cuda.enqueue(lambda: self._execute(bound))
        return True

    def _shape(self, name: str) -> tuple[int, ...]:
        fixed = tuple(self._engine.get_tensor_shape(name))
        return self._shapes[name] if -1 in fixed else fixed

    def _execute(self, bound: Any) -> None:
        binding = self._engine._session.io_binding()
        for each in bound.inputs:
            binding.bind_input(*each)
        for each in bound.outputs:
            if each[0] not in self._engine._emulated:
                binding.bind_output(*each)
        self._engine._session.run_with_iobinding(binding)
        arrays = {
            name: self._cuda.bytes_at(address, int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
            for name, _, _, dtype, shape, address in bound.outputs
            if dtype != onnx.TensorProto.BFLOAT16
        }
        if "next_token" in self._engine._emulated:
            arrays["next_token"][...] = arrays["logits"].argmax(axis=-1)
