"""What the tests of streams share: ids, the tolerance, and all of a stream's state. Ring: S = 2, W = 4, C = 16."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sinkring.runtime import Stream

V = 97
IDS = np.random.default_rng(5).integers(0, V, 60)
# float32 sums in another order; the logits' scale is about 3.
TOLERANCE = 1e-4


def assert_close(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert got.shape == expected.shape
    error = np.abs(got - expected)
    assert error.max() <= TOLERANCE, f"max {error.max():.2e}, mean {error.mean():.2e}; a tolerance of {error.max():.1e} would pass"


def logits_after(stream: Stream, ids: Any) -> NDArray[np.float32]:
    stream.reset()
    return stream.feed(ids)


def snapshot(stream: Stream) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    rows = stream._decoder.backend.read_row(stream.row)
    return {
        "position": stream.position,
        "fed": stream._fed,
        "reached": stream._reached,
        "pending": list(stream._pending),
        "history": list(stream._history),
        "logits": stream._logits.tobytes(),
        "logits_stand": stream._logits_stand,
        "rows": {name: row.tobytes() for name, row in rows.items()},
        "sampler": stream._sampler and stream._sampler.state(),
    }


def tokens_until(error: type[BaseException], loop: Iterator[int]) -> list[int]:
    """What the loop yields before it raises `error`."""
    tokens: list[int] = []
    with pytest.raises(error):
        collections.deque(map(tokens.append, loop), maxlen=0)
    return tokens


class Interrupted:
    """A backend whose n-th call is interrupted, before it runs or after."""

    def __init__(self, backend: Any, call: int, after: bool) -> None:
        self._backend, self._left, self._after = backend, call, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _run(self, call: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise KeyboardInterrupt
        result = call()
        if self._left == 0:
            raise KeyboardInterrupt
        return result

    def decode(self) -> None:
        self._run(self._backend.decode)

    def prefill(self, *arguments: Any) -> Any:
        return self._run(lambda: self._backend.prefill(*arguments))
