"""Memory bandwidth: how fast this machine reads memory that no cache holds. It bounds a decode step, which reads every weight once."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np

# Many times the last-level cache of today's servers.
BUFFER_BYTES = 1 << 29
_PASSES = 5


class BandwidthProbe:
    """A buffer of BUFFER_BYTES and as many threads as the decoder has, each of which takes the largest number of its part.

    Of numpy's reductions the largest is the one that does the least beside reading: it keeps no sum that waits for itself.
    """

    def __init__(self, threads: int) -> None:
        self._parts = np.array_split(np.ones(BUFFER_BYTES // 4, np.float32), threads)
        self._pool = ThreadPoolExecutor(threads)

    def sample(self) -> float:
        """Bytes read per second: the fastest of a few passes over the buffer. What it is for is a bound.

        The first passes are slower by up to half: other threads still spin, clocks and page tables are cold.
        """
        return BUFFER_BYTES / min(self._pass() for _ in range(_PASSES))

    def _pass(self) -> float:
        began = time.perf_counter()
        list(self._pool.map(np.maximum.reduce, self._parts))
        return time.perf_counter() - began

    def __enter__(self) -> "BandwidthProbe":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown()
        self._parts.clear()
