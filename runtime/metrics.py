"""What a decoder is doing, in numbers for a monitor: counted as it goes, in memory that is allocated when it is opened."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import CapacityError, InputError, NumericalError

# Percentiles and the rate are over so many calls; counters are over the decoder's whole life.
RECENT_CALLS = 1024
# No trained model comes near: logits of some tens are usual, and float16 ends at 65,504.
LARGEST_LOGIT = 1e5

Call = TypeVar("Call", bound=Callable[..., Any])


@dataclass(frozen=True)
class Metrics:
    """positions: of each open stream, by row. tokens: read or generated since the decoder was opened, over all streams.

    tokens_per_second: over the latest calls of the model, their own time alone; step_p50_ms, step_p99_ms: of the latest decode calls; None
    before the first. wraps: how often a stream's first ring has begun anew. refusals: calls that ended in an InputError or CapacityError.
    numerical_alarms: streams that were stopped because their logits were not finite or exploded.
    """

    positions: dict[int, int]
    tokens: int
    tokens_per_second: float | None
    step_p50_ms: float | None
    step_p99_ms: float | None
    cache_bytes: int
    wraps: int
    resets: int
    refusals: int
    numerical_alarms: int


class Recorder:
    """The counters behind `Decoder.metrics`."""

    def __init__(self) -> None:
        self.tokens = self.wraps = self.resets = self.refusals = self.numerical_alarms = 0
        self._seconds, self._call_tokens = np.zeros(RECENT_CALLS), np.zeros(RECENT_CALLS, np.int64)
        self._step_ms = np.zeros(RECENT_CALLS)
        self._calls = self._steps = 0

    def call(self, began: float, tokens: int, decode: bool) -> None:
        """A call of the model that began at `began` (time.perf_counter) and has just ended; tokens: of all rows that it advanced."""
        seconds = time.perf_counter() - began
        place = self._calls % RECENT_CALLS
        self._seconds[place], self._call_tokens[place] = seconds, tokens
        self._calls += 1
        self.tokens += tokens
        if decode:
            self._step_ms[self._steps % RECENT_CALLS] = seconds * 1e3
            self._steps += 1

    def rate(self) -> float | None:
        """Tokens per second of the latest calls."""
        recent = min(self._calls, RECENT_CALLS)
        seconds = float(self._seconds[:recent].sum())
        return float(self._call_tokens[:recent].sum()) / seconds if seconds else None

    def step_percentile(self, percent: float) -> float | None:
        """ms of the latest decode calls."""
        recent = min(self._steps, RECENT_CALLS)
        return float(np.percentile(self._step_ms[:recent], percent)) if recent else None


def counts_refusals(method: Call) -> Call:
    """For a method of what has a `recorder`: an InputError or CapacityError that leaves it is counted, once; alarms are counted apart."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except (InputError, CapacityError) as error:
            if not (error.counted or isinstance(error, NumericalError)):
                error.counted = True
                self.recorder.refusals += 1
            raise

    return call  # type: ignore[return-value]  # the same signature


def numerical_fault(logits: NDArray[np.float32]) -> str | None:
    """What is wrong with logits [..., V] as numbers, None for sound ones. Allocates no array for logits in one piece."""
    # Both find a NaN before anything else. Greedy sampling runs argmax next: its code is read once, where min and max have their own.
    low, high = logits.item(logits.argmin()), logits.item(logits.argmax())
    # A comparison with NaN is false.
    if low > -LARGEST_LOGIT and high < LARGEST_LOGIT:
        return None
    if np.isfinite(low) and np.isfinite(high):
        return f"reach from {low:.3g} to {high:.3g}, beyond ±{LARGEST_LOGIT:g}"
    return "are not finite"
