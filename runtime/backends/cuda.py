"""One NVIDIA GPU through cuda-python: a stream, memory that is allocated while a bundle is opened, and one captured graph.

Everything a Device hands out is given back by `close`, in one place. Calls on the stream return at once; `synchronize` waits for them.
"""

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import DependencyError, DeviceError

# What TensorRT asks of every address that it is given.
ALIGNMENT_BYTES = 256


class Device:
    """The first GPU that CUDA sees (CUDA_VISIBLE_DEVICES picks another). sm: compute capability, 10 x major + minor.

    backend, extra: named in errors, as what needs CUDA and what brings it. Raises DependencyError without cuda-python, a driver or a GPU.
    """

    def __init__(self, backend: str, extra: str) -> None:
        self._cudart = _load_runtime(backend, extra)
        self._memory: list[tuple[Callable[[int], Any], int]] = []
        self._graphs: list[Any] = []
        cudart = self._cudart
        code, count = cudart.cudaGetDeviceCount()
        if code != cudart.cudaError_t.cudaSuccess or count < 1:
            reason = "no GPU" if code == cudart.cudaError_t.cudaSuccess else self._words(code)
            raise DependencyError(
                f"backend {backend!r} runs on an NVIDIA GPU, and CUDA reports {reason}; install a driver that this CUDA takes (nvidia-smi "
                "shows it), or use the backend onnxruntime"
            )
        self._ok(cudart.cudaSetDevice(0), "cudaSetDevice")
        attributes = cudart.cudaDeviceAttr
        major, minor = (
            self._ok(cudart.cudaDeviceGetAttribute(attribute, 0), "cudaDeviceGetAttribute")
            for attribute in (attributes.cudaDevAttrComputeCapabilityMajor, attributes.cudaDevAttrComputeCapabilityMinor)
        )
        self.sm: int = 10 * major + minor
        name = self._ok(cudart.cudaGetDeviceProperties(0), "cudaGetDeviceProperties").name
        self.name: str = name.partition(b"\0")[0].decode()
        # Not the default stream, which waits for all others and cannot be captured.
        self._stream = self._ok(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking), "cudaStreamCreateWithFlags")
        self.stream = int(self._stream)

    def allocate(self, size_bytes: int, what: str) -> int:
        """Address of device memory with undefined content. `what` is named when there is not enough."""
        cudart = self._cudart
        code, address = cudart.cudaMalloc(max(size_bytes, 1))
        if code != cudart.cudaError_t.cudaSuccess:
            raise DeviceError(
                f"{what}: {size_bytes} bytes of device memory, {self.free_bytes()} are free ({self._words(code)}); close what else uses "
                "the GPU, or export with a smaller batch or window"
            )
        self._memory.append((cudart.cudaFree, int(address)))
        return int(address)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Zeros in page-locked host memory, which the GPU copies to and from by itself. Dead after `close`."""
        array = np.empty(shape, dtype)
        address = self._ok(self._cudart.cudaMallocHost(max(array.nbytes, 1)), f"cudaMallocHost of {array.nbytes} bytes")
        self._memory.append((self._cudart.cudaFreeHost, int(address)))
        whole = (ctypes.c_byte * array.nbytes).from_address(int(address))
        pinned: NDArray[Any] = np.frombuffer(memoryview(whole), array.dtype).reshape(shape)
        pinned[...] = 0
        return pinned

    def copy_in(self, address: int, array: NDArray[Any]) -> None:
        """Host to device, in stream order. The array must be contiguous, and stay as it is until `synchronize`."""
        self._copy(address, array.ctypes.data, array.nbytes, self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def copy_out(self, array: NDArray[Any], address: int) -> None:
        """Device to host, in stream order: `array`, contiguous, holds it after `synchronize`."""
        self._copy(array.ctypes.data, address, array.nbytes, self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def copy_across(self, to: int, source: int, size_bytes: int) -> None:
        """Within the device, in stream order."""
        self._copy(to, source, size_bytes, self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice)

    def copy_boxes(self, to: int, to_pitch: int, to_rows: int, source: int, pitch: int, rows: int, extent: tuple[int, int, int]) -> None:
        """One strided copy within the device. extent: (bytes in a line, lines in a slice, slices); lines lie a pitch apart (bytes), slices
        `rows` pitches."""
        cudart = self._cudart
        what = cudart.cudaMemcpy3DParms()
        what.srcPtr = _pitched(cudart, source, pitch, rows)
        what.dstPtr = _pitched(cudart, to, to_pitch, to_rows)
        what.extent = cudart.cudaExtent()
        what.extent.width, what.extent.height, what.extent.depth = extent
        what.kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._ok(cudart.cudaMemcpy3DAsync(what, self._stream), "cudaMemcpy3DAsync")

    def fill_zero(self, address: int, size_bytes: int) -> None:
        self._ok(self._cudart.cudaMemsetAsync(address, 0, size_bytes, self._stream), "cudaMemsetAsync")

    def capture(self, work: Callable[[], None]) -> Any:
        """What `work` puts on the stream, as one graph for `launch`; none of it runs now."""
        cudart = self._cudart
        # Thread-local: what other threads of the host do with CUDA must not end the capture.
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._ok(cudart.cudaStreamBeginCapture(self._stream, mode), "cudaStreamBeginCapture")
        try:
            work()
        except BaseException:
            cudart.cudaStreamEndCapture(self._stream)
            raise
        graph = self._ok(cudart.cudaStreamEndCapture(self._stream), "cudaStreamEndCapture")
        executable = self._ok(cudart.cudaGraphInstantiate(graph, 0), "cudaGraphInstantiate")
        self._graphs.append(executable)
        self._ok(cudart.cudaGraphDestroy(graph), "cudaGraphDestroy")
        # Else the first launch would allocate what it needs on the device.
        self._ok(cudart.cudaGraphUpload(executable, self._stream), "cudaGraphUpload")
        return executable

    def launch(self, graph: Any) -> None:
        self._ok(self._cudart.cudaGraphLaunch(graph, self._stream), "cudaGraphLaunch")

    def synchronize(self) -> None:
        """Wait for all that is on the stream. Errors of the work itself come out here."""
        self._ok(self._cudart.cudaStreamSynchronize(self._stream), "cudaStreamSynchronize")

    def free_bytes(self) -> int:
        """Device memory that nobody uses."""
        free, _ = self._ok(self._cudart.cudaMemGetInfo(), "cudaMemGetInfo")
        return int(free)

    def close(self) -> None:
        """Give back graphs, memory and the stream. After a fault of the GPU each of these calls fails, and nothing can be done about it."""
        cudart = self._cudart
        cudart.cudaStreamSynchronize(self._stream)
        while self._graphs:
            cudart.cudaGraphExecDestroy(self._graphs.pop())
        while self._memory:
            free, address = self._memory.pop()
            free(address)
        cudart.cudaStreamDestroy(self._stream)

    def _copy(self, to: int, source: int, size_bytes: int, kind: Any) -> None:
        self._ok(self._cudart.cudaMemcpyAsync(to, source, size_bytes, kind, self._stream), "cudaMemcpyAsync")

    def _ok(self, result: tuple[Any, ...], what: str) -> Any:
        """The values of a CUDA call: nothing, one, or a tuple. Raises DeviceError for its error code."""
        code, *values = result
        if code != self._cudart.cudaError_t.cudaSuccess:
            raise DeviceError(f"{what}: {self._words(code)} on {getattr(self, 'name', 'the GPU')}; close the bundle and open it again")
        return values[0] if len(values) == 1 else tuple(values)

    def _words(self, code: Any) -> str:
        _, text = self._cudart.cudaGetErrorString(code)
        return f"{code.name} ({text.decode()})"


def aligned(size_bytes: int) -> int:
    """Rounded up to what the next address must be a multiple of."""
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def _load_runtime(backend: str, extra: str) -> Any:
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise DependencyError(
            f"backend {backend!r} needs the Python package cuda.bindings ({error}): pip install 'sinkring[{extra}]'"
        ) from None


def _pitched(cudart: Any, address: int, pitch: int, rows: int) -> Any:
    pointer = cudart.cudaPitchedPtr()
    pointer.ptr, pointer.pitch, pointer.xsize, pointer.ysize = address, pitch, pitch, rows
    return pointer
