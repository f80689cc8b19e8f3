"""Denormal floats (below 1.2e-38) taken as zeros while a graph runs, on the thread that calls.

ONNX Runtime's Softmax computes exp(-104) for a slot that is masked, as the least that it can. That is a denormal number, and x86
processors take about a hundred cycles for each: a row that is half masked takes five times as long. ONNX Runtime has an option for the
threads of its pool (session.set_denormal_as_zero); the thread that calls, which does its share of each node, belongs to the user.
"""

import ctypes
import platform
import sys

# MXCSR: the results of an operation (bit 15) and its inputs (bit 6).
_FLUSH_TO_ZERO, _DENORMALS_ARE_ZERO = 1 << 15, 1 << 6
# In fenv_t of x86-64 (glibc, musl): 28 bytes of the x87 unit, then MXCSR.
_WORDS, _MXCSR = 8, 7


class DenormalsAsZero:
    """A context manager: inside it, the calling thread takes denormals as zeros; after it, the thread is as it was. Can be entered again
    and again, by one thread at a time. On other systems than Linux on x86-64 it changes nothing.
    """

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(None) if is_supported() else None
        self._before, self._inside = ((ctypes.c_uint32 * _WORDS)() for _ in range(2))

    def __enter__(self) -> None:
        if self._library is None:
            return
        self._library.fegetenv(self._before)
        ctypes.memmove(self._inside, self._before, ctypes.sizeof(self._before))
        self._inside[_MXCSR] |= _FLUSH_TO_ZERO | _DENORMALS_ARE_ZERO
        self._library.fesetenv(self._inside)

    def __exit__(self, *error: object) -> None:
        if self._library is not None:
            self._library.fesetenv(self._before)


def is_supported() -> bool:
    """Whether this system's floating-point environment is known to be as laid out above."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(ctypes.PyDLL(None), "fesetenv")
