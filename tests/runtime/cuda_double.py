"""A stand-in for `cuda.bindings.runtime` on a machine without a GPU: the real names, enums, structs and signatures over host memory.

Every call is held against the signature of the real function, so that a misspelt or misfed one fails. "Device" memory is host memory
full of NaN, and every address is checked to lie in something that is allocated. The stream is a queue that runs when it is waited for, so
that a result read too early is seen; while it is captured nothing runs at all, and an allocation ends the capture, as on a GPU.
"""

import ctypes
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

real = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")

OK = real.cudaError_t.cudaSuccess
BAD = real.cudaError_t.cudaErrorInvalidValue
STREAM = 77
POISON = 0xFF  # of float16, bfloat16 and float32: NaN


class CudaDouble:
    """calls: the name of each call in turn. capability and devices are those of the GPU that is not there."""

    def __init__(self, sm: int = 89, devices: int = 1, memory_bytes: int = 1 << 30) -> None:
        self.sm, self.devices, self.memory_bytes = sm, devices, memory_bytes
        self.no_driver = False
        self.calls: list[str] = []
        self.allocated: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.queue: list[Callable[[], None]] = []
        self.captured: list[Callable[[], None]] | None = None
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.open_streams = 0

    def __getattr__(self, name: str) -> Any:
        genuine = getattr(real, name)  # AttributeError for a name that cuda-python does not have
        if not name.startswith("cuda") or inspect.isclass(genuine) or not callable(genuine):
            return genuine
        stand_in = getattr(type(self), _snake(name), None)
        assert stand_in is not None, f"{name} is real, the double does not know it yet"

        def call(*arguments: Any) -> Any:
            bound = inspect.signature(genuine).bind(*arguments)
            for argument in bound.signature.parameters.values():
                enum = getattr(real, str(argument.annotation).strip("'"), None)
                if inspect.isclass(enum):
                    assert isinstance(bound.arguments[argument.name], enum), f"{name}: {argument.name} is no {enum.__name__}"
            self.calls.append(name)
            return stand_in(self, *arguments)

        return call

    def enqueue(self, work: Callable[[], None]) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def bytes_at(self, address: int, size: int, pinned: bool = False) -> np.ndarray:
        """View of `size` bytes, which must lie within one allocation."""
        for start, held in (self.pinned if pinned else self.allocated).items():
            if start <= address and address + size <= start + held.nbytes:
                return held[address - start :][:size]
        raise AssertionError(f"{size} bytes at {address:#x} are not within {'pinned' if pinned else 'device'} memory")

    def used_bytes(self) -> int:
        return sum(held.nbytes for held in self.allocated.values())

    def on_get_device_count(self) -> tuple[Any, int]:
        return (real.cudaError_t.cudaErrorInsufficientDriver, 0) if self.no_driver else (OK, self.devices)

    def on_get_error_string(self, code: Any) -> tuple[Any, bytes]:
        return real.cudaGetErrorString(code)

    def on_set_device(self, device: int) -> tuple[Any]:
        return (OK if device < self.devices else BAD,)

    def on_device_get_attribute(self, attribute: Any, device: int) -> tuple[Any, int]:
        tens = attribute == real.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor
        assert tens or attribute == real.cudaDeviceAttr.cudaDevAttrComputeCapabilityMinor
        return OK, self.sm // 10 if tens else self.sm % 10

    def on_get_device_properties(self, device: int) -> tuple[Any, Any]:
        properties = real.cudaDeviceProp()
        properties.name = b"Double GPU".ljust(256, b"\0")
        return OK, properties

    def on_mem_get_info(self) -> tuple[Any, int, int]:
        return OK, self.memory_bytes - self.used_bytes(), self.memory_bytes

    def on_stream_create_with_flags(self, flags: int) -> tuple[Any, Any]:
        assert flags == real.cudaStreamNonBlocking
        self.open_streams += 1
        return OK, real.cudaStream_t(STREAM)

    def on_stream_destroy(self, stream: Any) -> tuple[Any]:
        self.open_streams -= 1
        return (OK,)

    def on_malloc(self, size: int) -> tuple[Any, int]:
        assert self.captured is None, "an allocation ends the capture"
        if self.used_bytes() + size > self.memory_bytes:
            return real.cudaError_t.cudaErrorMemoryAllocation, 0
        return OK, _aligned(self.allocated, size, POISON)

    def on_malloc_host(self, size: int) -> tuple[Any, int]:
        assert self.captured is None, "an allocation ends the capture"
        return OK, _aligned(self.pinned, size, POISON)

    def on_free(self, address: int) -> tuple[Any]:
        assert not self.queue, "freed while the stream may use it"
        del self.allocated[address]
        return (OK,)

    def on_free_host(self, address: int) -> tuple[Any]:
        assert not self.queue, "freed while the stream may use it"
        # Its views may outlive it here, not on a GPU.
        self.pinned.pop(address)[:] = POISON
        return (OK,)

    def on_memcpy_async(self, to: int, source: int, size: int, kind: Any, stream: Any) -> tuple[Any]:
        assert int(stream) == STREAM
        kinds = real.cudaMemcpyKind
        assert kind in (kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost, kinds.cudaMemcpyDeviceToDevice)
        left = self.bytes_at(to, size, pinned=kind == kinds.cudaMemcpyDeviceToHost)
        right = self.bytes_at(source, size, pinned=kind == kinds.cudaMemcpyHostToDevice)
        self.enqueue(lambda: left.__setitem__(slice(None), right))
        return (OK,)

    def on_memcpy_3d_async(self, what: Any, stream: Any) -> tuple[Any]:
        assert int(stream) == STREAM
        assert what.kind == real.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        width, height, depth = what.extent.width, what.extent.height, what.extent.depth
        boxes = []
        for pointer in (what.dstPtr, what.srcPtr):
            assert width <= pointer.pitch
            assert height <= pointer.ysize
            self.bytes_at(pointer.ptr, ((depth - 1) * pointer.ysize + height - 1) * pointer.pitch + width)
            whole = (ctypes.c_ubyte * 1).from_address(pointer.ptr)
            shape, strides = (depth, height, width), (pointer.ysize * pointer.pitch, pointer.pitch, 1)
            boxes.append(np.lib.stride_tricks.as_strided(np.frombuffer(whole, np.uint8), shape, strides, writeable=True))
        self.enqueue(lambda: boxes[0].__setitem__(..., boxes[1]))
        return (OK,)

    def on_memset_async(self, address: int, value: int, size: int, stream: Any) -> tuple[Any]:
        assert int(stream) == STREAM
        held = self.bytes_at(address, size)
        self.enqueue(lambda: held.fill(value))
        return (OK,)

    def on_stream_synchronize(self, stream: Any) -> tuple[Any]:
        assert int(stream) == STREAM
        if self.captured is not None:
            return (real.cudaError_t.cudaErrorStreamCaptureUnsupported,)
        while self.queue:
            self.queue.pop(0)()
        return (OK,)

    def on_stream_begin_capture(self, stream: Any, mode: Any) -> tuple[Any]:
        self.captured = []
        return (OK,)

    def on_stream_end_capture(self, stream: Any) -> tuple[Any, Any]:
        assert self.captured is not None
        handle = 1000 + len(self.graphs)
        self.graphs[handle], self.captured = self.captured, None
        return OK, real.cudaGraph_t(handle)

    def on_graph_instantiate(self, graph: Any, flags: int) -> tuple[Any, Any]:
        return OK, real.cudaGraphExec_t(int(graph))

    def on_graph_upload(self, executable: Any, stream: Any) -> tuple[Any]:
        return (OK,)

    def on_graph_destroy(self, graph: Any) -> tuple[Any]:
        return (OK,)

    def on_graph_launch(self, executable: Any, stream: Any) -> tuple[Any]:
        self.queue += self.graphs[int(executable)]
        return (OK,)

    def on_graph_exec_destroy(self, executable: Any) -> tuple[Any]:
        del self.graphs[int(executable)]
        return (OK,)


def _snake(name: str) -> str:
    """cudaMemcpy3DAsync -> on_memcpy_3d_async"""
    return re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=3D)(?=[A-Z])", "_", name).lower().replace("cuda", "on", 1)


def _aligned(table: dict[int, np.ndarray], size: int, fill: int) -> int:
    padded = np.full(size + 256, fill, np.uint8)
    address = padded.ctypes.data + -padded.ctypes.data % 256
    table[address] = padded[address - padded.ctypes.data :][:size]
    return address
