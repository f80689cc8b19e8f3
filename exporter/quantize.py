"""Weights in blocks: each 32 weights along the input axis are small integers with one scale and one zero point.

    weight = scale * (value - zero_point) [+ residual]

A block taken over from another format may lie off that grid by one number, its residual; blocks made here have none.
Rounding is to nearest; what is searched for is the grid. A block's range is tried at several widths, and after each the scale is set to
the one with the least squared error for the integers it led to (its normal equation has one unknown, so that is exact).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 32
# Widths of a block's grid that are tried, as shares of the range of its weights: the outermost weights are clipped if that serves the rest.
_WIDTHS = {4: (1.0, 0.92, 0.84, 0.76), 8: (1.0,)}
# Blocks that are searched at a time: the tensors of the search then stay in a core's cache.
_BLOCKS_AT_A_TIME = 1 << 12


@dataclass(frozen=True)
class BlockMatrix:
    """A weight [N,K] (outputs, inputs) in blocks along K.

    values: uint8 [N,K], 0 .. 2^bits - 1; scales: float32 [N,K/32]; zero_points: uint8 [N,K/32], 0 .. 2^bits - 1;
    residuals: float32 [N,K/32], or None if all are 0.
    """

    bits: int
    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]
    residuals: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.values.shape[0], self.values.shape[1]

    def packed_values(self) -> NDArray[np.uint8]:
        """uint8 [N,ceil(K/32),32*bits/8], the layout of MatMulNBits: of two 4-bit values in a byte the first is in the low half."""
        blocks = self.scales.shape[1]
        values = np.pad(self.values, ((0, 0), (0, blocks * BLOCK - self.shape[1])))
        return pack(values, self.bits).reshape(len(values), blocks, BLOCK * self.bits // 8)

    def with_residuals_as_weights(self) -> "BlockMatrix":
        """[N,K+n*K/32] without residuals: behind the weights those of more inputs, the sums of the blocks n times (`copies_of_sums`).

        The first sums have one digit of the residuals and the last the next, in blocks of their own with smaller scales; those between
        count nothing. The last block may be part of one, as the operator takes it.
        """
        assert self.residuals is not None, "there are residuals to keep"
        count = self.residuals.shape[1]
        between = (copies_of_sums(count) - 1) * count
        first = _in_whole_blocks(self.residuals, 0, between, self.bits)
        left = self.residuals - first.dequantized()[:, :count]
        last = _in_whole_blocks(left, between, 0, self.bits)
        # No block has numbers of both.
        of_first = np.arange(first.scales.shape[1]) * BLOCK < count
        values = np.where(np.repeat(of_first, BLOCK), first.values, last.values)[:, : between + count]
        return BlockMatrix(
            self.bits,
            np.concatenate([self.values, values], axis=1),
            np.concatenate([self.scales, np.where(of_first, first.scales, last.scales)], axis=1),
            np.concatenate([self.zero_points, np.where(of_first, first.zero_points, last.zero_points)], axis=1),
        )

    def packed_zero_points(self) -> NDArray[np.uint8]:
        """uint8 [N,ceil(K/32*bits/8)]."""
        return pack(self.zero_points, self.bits)

    def dequantized(self) -> NDArray[np.float32]:
        """float32 [N,K]."""
        rows, inputs = self.shape
        centred = self.values.reshape(rows, -1, BLOCK).astype(np.float32) - self.zero_points[:, :, None]
        blocks = centred * self.scales[:, :, None]
        if self.residuals is not None:
            blocks += self.residuals[:, :, None]
        return blocks.reshape(rows, inputs)


def copies_of_sums(blocks: int) -> int:
    """How often the sums of a row's blocks are inputs, so that the last of them share no block with the first."""
    in_whole_blocks = -(-blocks // BLOCK) * BLOCK
    return 1 + -(-in_whole_blocks // blocks)


def _in_whole_blocks(numbers: NDArray[np.float32], before: int, behind: int, bits: int) -> BlockMatrix:
    """float32 [N,n], with zeros before and behind it, in blocks; zeros stay zeros."""
    behind += -(before + numbers.shape[1] + behind) % BLOCK
    return quantize_blocks(torch.from_numpy(np.pad(numbers, ((0, 0), (before, behind)))), bits)


def pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Integers of `bits` (4 or 8) bits, packed along the last axis; an odd end is filled up with 0."""
    if bits == 8:
        return values
    padded = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    return padded[:, 0::2] | padded[:, 1::2] << np.uint8(4)


def stack(matrices: list[BlockMatrix]) -> BlockMatrix:
    """One matrix of the outputs of all, which read the same inputs: [N1,K], [N2,K], ... -> [N1+N2+...,K]."""
    residuals = None
    if any(matrix.residuals is not None for matrix in matrices):
        residuals = np.concatenate([np.zeros_like(part.scales) if part.residuals is None else part.residuals for part in matrices])
    return BlockMatrix(
        matrices[0].bits,
        np.concatenate([matrix.values for matrix in matrices]),
        np.concatenate([matrix.scales for matrix in matrices]),
        np.concatenate([matrix.zero_points for matrix in matrices]),
        residuals,
    )


def quantize_blocks(weight: torch.Tensor, bits: int) -> BlockMatrix:
    """float [N,K], K a multiple of 32, to `bits` (4 or 8) bits."""
    rows, inputs = weight.shape
    blocks = weight.detach().float().reshape(-1, BLOCK)
    parts = [_search(part, bits) for part in blocks.split(_BLOCKS_AT_A_TIME)]
    values, scales, zeros = (torch.cat([part[index] for part in parts]) for index in range(3))
    return BlockMatrix(
        bits,
        values.to(torch.uint8).reshape(rows, inputs).numpy(),
        scales.reshape(rows, -1).numpy(),
        zeros.to(torch.uint8).reshape(rows, -1).numpy(),
    )


def _search(blocks: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """blocks [n,32] -> values [n,32], scales [n,1], zero points [n,1] of the least squared error among those tried."""
    top = (1 << bits) - 1
    # Zero is on the grid, so that it stays zero.
    low, high = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
    best_error = torch.full_like(low, torch.inf)
    best = (torch.zeros_like(blocks), torch.zeros_like(low), torch.zeros_like(low))
    for width in _WIDTHS[bits]:
        scale = (high - low) * (width / top)
        scale = torch.where(scale > 0, scale, 1.0)
        exact_zero = -low * width / scale
        for zero in (exact_zero.floor(), exact_zero.ceil()):
            zero = zero.clamp(0, top)
            values = torch.clamp(torch.round(blocks / scale) + zero, 0, top)
            centred = values - zero
            squares = (centred * centred).sum(1, keepdim=True)
            fitted = torch.where(squares > 0, (blocks * centred).sum(1, keepdim=True) / squares, scale)
            error = (blocks - fitted * centred).square_().sum(1, keepdim=True)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best = tuple(torch.where(better, new, old) for new, old in zip((values, fitted, zero), best, strict=True))  # type: ignore[assignment]
    return best
