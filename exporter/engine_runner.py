"""A Polygraphy runner around a TensorRT or TensorRT-RTX engine, on this runtime's own device memory.

Polygraphy's own runner picks its TensorRT by an environment variable that is read when it is imported; this one takes either, and ties
each cache to its update as the runtime does.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.datatype import DataType
from sinkring.runtime.backends.cuda import Device, aligned
from sinkring.runtime.backends.engine import DTYPES, load_tensorrt, make_log
from sinkring.runtime.bfloat16 import host_dtype
from sinkring.runtime.device_sampling import SAMPLING_INPUTS
from sinkring.runtime.errors import BundleError, DeviceError


class EngineRunner(BaseRunner):
    """target: "tensorrt" or "tensorrt-rtx". load: the serialized engine, given the TensorRT module and the device.

    Every shape of the engine is fixed. Activating raises DependencyError without the packages, a driver or a GPU, what `load` raises,
    BundleError for an engine that does not load here, DeviceError when the GPU's memory does not suffice.
    """

    def __init__(self, name: str, target: str, load: Callable[[Any, Device], bytes | memoryview]) -> None:
        super().__init__(name=name)
        self._target, self._load = target, load

    def activate_impl(self) -> None:
        trt = load_tensorrt(self._target)
        self._device = Device(self._target, extra=self._target)
        try:
            self._open(trt)
        except BaseException:
            self._device.close()
            raise

    def get_input_metadata_impl(self) -> Any:
        metadata = TensorMetadata()
        for name in self._inputs:
            metadata.add(name, dtype=DataType.from_dtype(self._host[name].dtype), shape=self._host[name].shape)
        return metadata

    def infer_impl(self, feed_dict: dict[str, NDArray[Any]]) -> OrderedDict[str, NDArray[Any]]:
        began = time.perf_counter()
        for name in self._inputs:
            self._host[name][...] = feed_dict[name]
            self._device.copy_in(self._addresses[name], self._host[name])
        if not self._context.execute_async_v3(self._device.stream):
            raise DeviceError(f"{self.name}: the run was not accepted: {self._log.last()}")
        for name in self._outputs:
            self._device.copy_out(self._host[name], self._addresses[name])
        self._device.synchronize()
        self.inference_time = time.perf_counter() - began
        return OrderedDict((name, self._host[name].copy()) for name in self._outputs)

    def deactivate_impl(self) -> None:
        del self._context, self._engine, self._runtime
        self._host.clear()
        self._device.close()

    def _open(self, trt: Any) -> None:
        serialized = self._load(trt, self._device)
        self._log = make_log(trt)
        self._runtime = trt.Runtime(self._log)
        self._engine = engine = self._runtime.deserialize_cuda_engine(serialized)
        if engine is None:
            raise BundleError(f"{self.name}: cannot be loaded on {self._device.name}: {self._log.last()}; build it again")
        self._context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._context is None:
            raise DeviceError(f"{self.name}: no execution context on {self._device.name}: {self._log.last()}; close what else uses the GPU")
        scratch_bytes = aligned(int(engine.device_memory_size_v2))
        self._context.set_device_memory(self._device.allocate(scratch_bytes, "scratch"), scratch_bytes)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in inputs]
        # What a sampling head reads stays zero: nobody looks at the token it picks.
        self._inputs = [name for name in inputs if name not in SAMPLING_INPUTS]
        self._host: dict[str, NDArray[Any]] = {}
        self._addresses: dict[str, int] = {}
        for name in names:
            dtype = DTYPES[engine.get_tensor_dtype(name).name]
            self._host[name] = self._device.pinned(tuple(engine.get_tensor_shape(name)), host_dtype(dtype))
            alias = engine.get_aliased_input_tensor(name) if name in self._outputs else None
            self._addresses[name] = self._addresses[alias] if alias else self._device.allocate(self._host[name].nbytes, name)
            if not self._context.set_tensor_address(name, self._addresses[name]):
                raise DeviceError(f"{self.name}: {name!r} cannot be bound: {self._log.last()}")
            if name in SAMPLING_INPUTS:
                self._device.copy_in(self._addresses[name], self._host[name])
