"""How far two runs over the same tokens are apart: figures per step, and rows that sum them up by the age of the stream.

Letters: N steps, T steps of one call, V vocabulary. KL and sums are in float64: in float32 the terms of a KL of 1e-10 are all rounding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.ring import RingGeometry

# Rows widened to float64 at a time: at V = 150,000 they take 20 MB.
_ROWS_AT_A_TIME = 16


@dataclass(frozen=True)
class Span:
    """Positions start .. stop-1 of a stream, by what the ring does there."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Region:
    """One row of a report: a run against the oracle over one span of positions.

    Errors are in logits, KL(oracle || bundle) in nats; a step that is not finite has infinite ones. top1 is the fraction of steps with the
    oracle's best token, top1_decided that of the steps where the oracle's best is ahead of its second by more than the tolerance (None if
    there are none). first_divergence: position of the first step whose error passes the tolerance, None if none does.
    """

    run: str
    region: str
    start: int
    stop: int
    max_error: float
    mean_error: float
    max_error_position: int
    kl_max: float
    kl_mean: float
    top1: float
    top1_decided: float | None
    decided_steps: int
    first_divergence: int | None
    non_finite_steps: int

    @property
    def steps(self) -> int:
        return self.stop - self.start


def age_spans(geometry: RingGeometry, steps: int) -> tuple[Span, ...]:
    """The spans that a stream of `steps` tokens reaches, by what one ring does; of several, by the one that wraps last.

    "filling": every write is to a fresh slot, positions 0 .. C-1 (from S+W on tokens already leave the window, but stay in the slack).
    "first wrap": each write overwrites a token of the first lap, M positions. "later wraps": all after that.
    """
    second_lap, third_lap = geometry.capacity, geometry.capacity + geometry.slots
    spans = (Span("filling", 0, second_lap), Span("first wrap", second_lap, third_lap), Span("later wraps", third_lap, steps))
    return tuple(Span(span.name, span.start, min(span.stop, steps)) for span in spans if span.start < steps)


class Divergence:
    """Figures per step of a run against `expected` float32 [N, V], whose first row belongs to position `first`.

    Fill it with `add` in any order of positions. max_error, mean_error, kl: float64 [N], infinite for a step with a logit that is not
    finite; agrees: bool [N], the same best token; finite, seen: bool [N].
    """

    def __init__(self, expected: NDArray[np.float32], first: int = 0) -> None:
        self.expected, self.first = expected, first
        steps = len(expected)
        self.max_error, self.mean_error, self.kl = (np.full(steps, np.inf) for _ in range(3))
        self.agrees, self.finite, self.seen = (np.zeros(steps, bool) for _ in range(3))

    def add(self, position: int, logits: NDArray[np.float32]) -> None:
        """Compare logits float32 [T, V] of positions `position` .. `position`+T-1; those that `expected` does not cover are passed over."""
        start = max(position, self.first)
        stop = min(position + len(logits), self.first + len(self.expected))
        for at in range(start, stop, _ROWS_AT_A_TIME):
            end = min(at + _ROWS_AT_A_TIME, stop)
            self._compare(slice(at - self.first, end - self.first), logits[at - position : end - position])

    def _compare(self, rows: slice, logits: NDArray[np.float32]) -> None:
        expected, got = self.expected[rows].astype(np.float64), logits.astype(np.float64)
        finite = np.isfinite(got).all(axis=1)
        got[~finite] = expected[~finite]  # any finite numbers: these rows are overwritten below
        error = np.abs(got - expected)
        wanted, found = _log_softmax(expected), _log_softmax(got)
        # The true sum is never below 0, the rounded one can be.
        kl = np.maximum((np.exp(wanted) * (wanted - found)).sum(axis=1), 0.0)
        self.max_error[rows] = np.where(finite, error.max(axis=1), np.inf)
        self.mean_error[rows] = np.where(finite, error.mean(axis=1), np.inf)
        self.kl[rows] = np.where(finite, kl, np.inf)
        self.agrees[rows] = finite & (got.argmax(axis=1) == expected.argmax(axis=1))
        self.finite[rows] = finite
        self.seen[rows] = True

    def region(self, run: str, span: Span, margins: NDArray[np.float32], tolerance: float) -> Region:
        """Sum up one span, all of whose steps were added. margins float32 [N]: how far the expected best token is ahead of the second."""
        rows = slice(span.start - self.first, span.stop - self.first)
        assert self.seen[rows].all(), f"{run}: {span.name} was not run to its end"
        error, agrees = self.max_error[rows], self.agrees[rows]
        decided = margins[rows] > tolerance
        past = np.flatnonzero(error > tolerance)
        return Region(
            run=run,
            region=span.name,
            start=span.start,
            stop=span.stop,
            max_error=float(error.max()),
            mean_error=float(self.mean_error[rows].mean()),
            max_error_position=span.start + int(error.argmax()),
            kl_max=float(self.kl[rows].max()),
            kl_mean=float(self.kl[rows].mean()),
            top1=float(agrees.mean()),
            top1_decided=float(agrees[decided].mean()) if decided.any() else None,
            decided_steps=int(decided.sum()),
            first_divergence=span.start + int(past[0]) if past.size else None,
            non_finite_steps=int((~self.finite[rows]).sum()),
        )


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis of [T, V]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
