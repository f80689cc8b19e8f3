"""Rows that a program gives out, copied into the caches on the device, in stream order behind the run that made them.

While it runs the program reads the caches, so a row is copied after the run and not before. Where it goes changes from step to step, and a
captured graph would repeat one address: these copies are put on the stream behind its launch. The rows of the caches of one block lie side
by side as the caches do (see device_states), so that a decode step is one strided copy for each stream and block, whatever the layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sinkring.runtime.backends.cuda import ALIGNMENT_BYTES, Device, aligned
from sinkring.runtime.backends.device_states import CacheBlock, DeviceStates
from sinkring.runtime.manifest import rows_name


@dataclass(frozen=True)
class _RowsBlock:
    """The rows for one block of caches. state_bytes: how far the rows for one cache lie from those for the next."""

    caches: CacheBlock
    address: int
    state_bytes: int


class DeviceRows:
    """Memory for the outputs of `rows` streams and at most `tokens` tokens. addresses: of each output, by name."""

    def __init__(self, device: Device, states: DeviceStates, rows: int, tokens: int) -> None:
        self._device = device
        self._blocks = [self._allocate(block, rows, tokens) for block in states.blocks]
        self.addresses = {
            rows_name(state.name): block.address + index * block.state_bytes
            for block in self._blocks
            for index, state in enumerate(block.caches.states)
        }

    def write_step(self, row: int, slots: Sequence[int]) -> None:
        """The one new row of the stream in `row`, to its slot in each ring."""
        for block in self._blocks:
            caches = block.caches
            size, heads = caches.slot_bytes, caches.heads
            source = (block.address + row * heads * size, size, block.state_bytes // size)
            self._device.copy_boxes(*_place(caches, row, slots), *source, (size, heads, len(caches.states)))

    def write_chunk(self, row: int, tokens: int, slots: Sequence[int]) -> None:
        """The new rows of a call for one stream, to the slots from the named one of each ring on."""
        for block in self._blocks:
            caches = block.caches
            size, heads = tokens * caches.slot_bytes, caches.heads
            to, pitch, lines = _place(caches, row, slots)
            # An output begins where it is bound and has no gaps, so that its lines are as long as the call has tokens.
            for index in range(len(caches.states)):
                source = (block.address + index * block.state_bytes, size, heads)
                self._device.copy_boxes(to + index * lines * pitch, pitch, lines, *source, (size, heads, 1))

    def _allocate(self, caches: CacheBlock, rows: int, tokens: int) -> _RowsBlock:
        """Each output's address is one that TensorRT takes, and a whole number of slots from the next."""
        step = math.lcm(ALIGNMENT_BYTES, caches.slot_bytes)
        state_bytes = rows * caches.heads * tokens * caches.slot_bytes
        state_bytes += -state_bytes % step
        what = f"new rows of {len(caches.states)} caches"
        return _RowsBlock(caches, self._device.allocate(aligned(len(caches.states) * state_bytes), what), state_bytes)


def _place(caches: CacheBlock, row: int, slots: Sequence[int]) -> tuple[int, int, int]:
    """The slot of one stream in the first cache of a block: address, bytes from one head to the next, heads from one cache to the next."""
    ring = caches.states[0].ring
    assert ring is not None, "only caches have rows"
    return caches.address + row * caches.row_bytes + slots[ring] * caches.slot_bytes, caches.line_bytes, caches.lines
