"""Spread: what is told of repeated samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Spread:
    """Median, middle half, 99th percentile and number of the samples, in the samples' unit."""

    median: float
    p25: float
    p75: float
    p99: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float] | NDArray[np.float64]) -> "Spread":
        p25, median, p75, p99 = (float(value) for value in np.percentile(samples, [25, 50, 75, 99]))
        return cls(median, p25, p75, p99, len(samples))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.p25:.4g} .. {self.p75:.4g})"
