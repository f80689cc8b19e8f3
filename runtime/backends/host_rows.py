"""Rows that a graph gives out, written into the rings in host memory once its run is over.

While it runs the graph reads the rings, so a row is written after the run and not before: the slot that it goes to still holds the token
that the mask has taken out. All buffers are allocated once.
"""

from collections.abc import Collection, Sequence

import numpy as np
from sinkring.runtime.manifest import Manifest, rows_name


class HostRows:
    """The outputs for the new rows of `rows` streams and at most `tokens` tokens, beside the states that they go to.

    states: array [B,G,C,D] by name. Each output lies in a buffer of its own, from its beginning on and in one piece, whatever T is.
    """

    def __init__(self, manifest: Manifest, states: dict[str, np.ndarray], rows: int, tokens: int) -> None:
        self._cached = [(state, states[state.name]) for state in manifest.states if state.ring is not None]
        assert len(self._cached) == len(manifest.states), "rows are those of caches"
        self._shapes = {state.name: (rows, state.shape[1], tokens, state.shape[3]) for state, _ in self._cached}
        self._flat = {state.name: np.zeros(int(np.prod(self._shapes[state.name])), array.dtype) for state, array in self._cached}

    def of_chunk(self, tokens: int) -> dict[str, np.ndarray]:
        """Where the outputs of a call of `tokens` tokens go, [rows,G,tokens,D] by output."""
        return {rows_name(state.name): self._view(state.name, tokens) for state, _ in self._cached}

    def write_step(self, write_index: Sequence[np.ndarray], idle: Collection[int]) -> None:
        """The one new row of every stream but the idle ones. write_index: int64 [B] of each ring."""
        for state, array in self._cached:
            new, slots = self._view(state.name, 1), write_index[state.ring or 0]
            for row in range(len(array)):
                if row not in idle:
                    array[row, :, slots[row]] = new[row, :, 0]

    def write_chunk(self, row: int, tokens: int, write_index: Sequence[int]) -> None:
        """The new rows of a call for one stream. write_index: of each ring."""
        for state, array in self._cached:
            first = write_index[state.ring or 0]
            array[row, :, first : first + tokens] = self._view(state.name, tokens)[0]

    def _view(self, name: str, tokens: int) -> np.ndarray:
        rows, heads, _, size = self._shapes[name]
        return self._flat[name][: rows * heads * tokens * size].reshape(rows, heads, tokens, size)
