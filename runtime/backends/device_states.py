"""The state tensors of a bundle in device memory: where they lie, and what is done to one row of them.

Tensors of one shape lie in one block, each at the same distance from the next. One slot of a row, in all of them and for all heads, is then
a box that a single strided copy moves: what an idle row has to keep costs two copies a row, however many layers there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.backends.cuda import ALIGNMENT_BYTES, Device
from sinkring.runtime.bfloat16 import host_dtype
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import DTYPE_BYTES, Manifest, StateTensor


@dataclass(frozen=True)
class CacheBlock:
    """States of one ring, shape [B,G,C,D] and dtype. line_bytes: one head of one row, C slots; a tensor takes `lines` of them."""

    states: tuple[StateTensor, ...]
    address: int
    kept: int
    lines: int

    @property
    def slot_bytes(self) -> int:
        state = self.states[0]
        return state.shape[-1] * DTYPE_BYTES[state.dtype]

    @property
    def line_bytes(self) -> int:
        return self.states[0].shape[-2] * self.slot_bytes

    @property
    def heads(self) -> int:
        return self.states[0].shape[1]

    @property
    def row_bytes(self) -> int:
        return self.heads * self.line_bytes

    @property
    def kept_bytes(self) -> int:
        """What an idle row keeps: one slot of each head and state."""
        return len(self.states) * self.heads * self.slot_bytes


class DeviceStates:
    """All state tensors, allocated and at their initial value once `reset_row` was called for each row. blocks: where they lie.

    Raises UnsupportedError for a state that is no cache of zeros, or whose rows do not lie where TensorRT takes an address.
    """

    def __init__(self, device: Device, manifest: Manifest) -> None:
        self._device, self._manifest = device, manifest
        self.blocks = [self._allocate(states) for states in _alike(manifest)]
        self._addresses = {
            state.name: block.address + index * block.lines * block.line_bytes
            for block in self.blocks
            for index, state in enumerate(block.states)
        }
        self._row_bytes = {state.name: block.row_bytes for block in self.blocks for state in block.states}
        # One for all states: those of a large model would pin gigabytes.
        self._staging = device.pinned((max(self._row_bytes.values()),), np.uint8)

    def addresses(self) -> dict[str, int]:
        return dict(self._addresses)

    def row_address(self, state: StateTensor, row: int) -> int:
        return self._addresses[state.name] + row * self._row_bytes[state.name]

    def read_row(self, row: int) -> dict[str, NDArray[Any]]:
        """Copies, [1,G,C,D] by name."""
        held = {}
        for state in self._manifest.states:
            staged = self._staged(state)
            self._device.copy_out(staged, self.row_address(state, row))
            self._device.synchronize()
            held[state.name] = staged.copy()
        return held

    def write_row(self, row: int, values: dict[str, NDArray[Any]]) -> None:
        for state in self._manifest.states:
            staged = self._staged(state)
            staged[...] = values[state.name]
            self._device.copy_in(self.row_address(state, row), staged)
            self._device.synchronize()

    def reset_row(self, row: int) -> None:
        for state in self._manifest.states:
            self._device.fill_zero(self.row_address(state, row), self._row_bytes[state.name])
        self._device.synchronize()

    def keep(self, rows: Sequence[int], write_index: tuple[NDArray[np.int64], ...]) -> None:
        """Copy away, in stream order, the slots that a decode step is about to write in `rows`."""
        self._move(rows, write_index, back=False)

    def put_back(self, rows: Sequence[int], write_index: tuple[NDArray[np.int64], ...]) -> None:
        """Undo what a decode step has written in `rows` since `keep`."""
        self._move(rows, write_index, back=True)

    def _staged(self, state: StateTensor) -> NDArray[Any]:
        """One row of a state in the pinned memory that all of them share."""
        return self._staging[: self._row_bytes[state.name]].view(host_dtype(state.dtype)).reshape(1, *state.shape[1:])

    def _move(self, rows: Sequence[int], write_index: tuple[NDArray[np.int64], ...], back: bool) -> None:
        for block in self.blocks:
            ring = block.states[0].ring
            assert ring is not None
            extent = (block.slot_bytes, block.heads, len(block.states))
            for row in rows:
                slot = int(write_index[ring][row])
                cache = (block.address + row * block.row_bytes + slot * block.slot_bytes, block.line_bytes, block.lines)
                kept = (block.kept + row * block.kept_bytes, block.slot_bytes, block.heads)
                self._device.copy_boxes(*(cache if back else kept), *(kept if back else cache), extent)

    def _allocate(self, states: tuple[StateTensor, ...]) -> CacheBlock:
        state = states[0]
        batch, heads = state.shape[0], state.shape[1]
        block = CacheBlock(states, 0, 0, 0)
        if batch > 1 and block.row_bytes % ALIGNMENT_BYTES:
            raise UnsupportedError(
                f"{state.name}: a row has {block.row_bytes} bytes, and TensorRT takes addresses that are multiples of {ALIGNMENT_BYTES}; "
                "export with another window, or with --batch 1"
            )
        lines = batch * heads
        step = ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, block.line_bytes)
        lines += -lines % step
        what = f"{len(states)} caches of {state.dtype} {list(state.shape)}"
        address = self._device.allocate(len(states) * lines * block.line_bytes, what)
        return CacheBlock(states, address, self._device.allocate(batch * block.kept_bytes, "one slot of each cache"), lines)


def _alike(manifest: Manifest) -> list[tuple[StateTensor, ...]]:
    """The states in groups of one ring, shape and dtype."""
    groups: dict[tuple[object, ...], list[StateTensor]] = {}
    for state in manifest.states:
        if state.kind == "counter" or state.initial != 0 or state.batch_axis != 0 or len(state.shape) != 4:
            raise UnsupportedError(
                f"{state.name}: {state.kind} {list(state.shape)}, rows on axis {state.batch_axis}, initially {state.initial}; on a GPU "
                "states are caches [B,G,C,D] that begin with zeros; use the backend onnxruntime"
            )
        groups.setdefault((state.ring, state.shape, state.dtype), []).append(state)
    return [tuple(group) for group in groups.values()]
