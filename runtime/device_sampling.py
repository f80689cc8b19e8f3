"""What a step is told so that its graph can sample by itself: a draw, the temperature and top-k of each row, as whole numbers.

All inputs of a step are int64 and travel in one copy. A float32 loses nothing on the way: a draw has DRAW_BITS binary places, as many as
float32 has below 1, and a temperature of 0.001 to 1000 is a whole multiple of 2**-33.
"""

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.sampling import SamplingOptions

DRAW, TEMPERATURE, TOP_K = "sample.draw", "sample.temperature", "sample.top_k"
SAMPLING_INPUTS = (DRAW, TEMPERATURE, TOP_K)
DRAW_UNIT, TEMPERATURE_UNIT = 2.0**-24, 2.0**-33
# What a row is told that takes the likeliest token, or whose token nobody reads.
GREEDY = {DRAW: 0, TEMPERATURE: int(1 / TEMPERATURE_UNIT), TOP_K: 1}
# Each step compares top-k ids with one another.
MOST_TOP_K = 1024


def candidates(options: SamplingOptions, vocab_size: int) -> int:
    """How many of the likeliest tokens one is drawn from: 1 when greedy, V without top-k."""
    if options.temperature == 0:
        return 1
    return min(options.top_k or vocab_size, vocab_size)


def sampling_inputs(options: SamplingOptions, draws: NDArray[np.float64]) -> dict[str, NDArray[np.int64]]:
    """draws float64 [n] in [0, 1): one a step. int64 [n] each, by input name."""
    if options.temperature == 0:
        return {name: np.full(len(draws), value, np.int64) for name, value in GREEDY.items()}
    temperature = int(np.float64(np.float32(options.temperature)) / TEMPERATURE_UNIT)
    return {
        DRAW: (draws / DRAW_UNIT).astype(np.int64),
        TEMPERATURE: np.full(len(draws), temperature, np.int64),
        TOP_K: np.full(len(draws), options.top_k, np.int64),
    }
