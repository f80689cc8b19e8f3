"""Weights for engines: integers or 8-bit floats without a zero point, as DequantizeLinear reads them.

    weight = scale * value

int4: each block of 32, 64 or 128 weights along the input axis has a scale. int8 and fp8 (e4m3): each output, a row of the weight, has one.
Rounding is to nearest. Of 4-bit blocks several widths of the grid are tried, and after each the scale is set to the one with the least
squared error for the integers it led to (its normal equation has one unknown, so that is exact). The grid has one step more below zero than
above: with scales of either sign, that step is on the side of a block's largest weight, which takes a twelfth off the error.
"""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

SymmetricKind = Literal["int4", "int8", "fp8"]
BLOCKS = (32, 64, 128)
# What the values of each kind are to numpy, and the largest of them.
VALUE_DTYPES = {"int4": np.dtype(ml_dtypes.int4), "int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
_LARGEST = {"int4": 7.0, "int8": 127.0, "fp8": 448.0}
# Widths of a 4-bit block's grid that are tried, as shares of its largest weight. 7/8: the one whose -8 is that weight.
_WIDTHS = (1.0, 0.935, 0.875, 0.84, 0.78)
_BLOCKS_AT_A_TIME = 1 << 12


@dataclass(frozen=True)
class SymmetricMatrix:
    """A weight [N,K] (outputs, inputs). values: [N,K] of VALUE_DTYPES[kind]; scales: float32 [N,K/block] of int4, [N,1] of the others.

    block: weights along K that share a scale; K itself for int8 and fp8.
    """

    kind: SymmetricKind
    block: int
    values: NDArray
    scales: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.values.shape[0], self.values.shape[1]

    def dequantized(self) -> NDArray[np.float32]:
        """float32 [N,K]."""
        rows, inputs = self.shape
        blocks = self.values.astype(np.float32).reshape(rows, -1, self.block) * self.scales[:, :, None]
        return blocks.reshape(rows, inputs)


def stack_symmetric(matrices: list[SymmetricMatrix]) -> SymmetricMatrix:
    """One matrix of the outputs of all, of one kind and block, which read the same inputs: [N1,K], [N2,K], ... -> [N1+N2+...,K]."""
    first = matrices[0]
    values, scales = ([getattr(matrix, name) for matrix in matrices] for name in ("values", "scales"))
    return SymmetricMatrix(first.kind, first.block, np.concatenate(values), np.concatenate(scales))


def largest_block(inputs: int, wanted: int) -> int | None:
    """The largest block of at most `wanted` weights that `inputs` is a multiple of; None if there is none."""
    return next((block for block in reversed(BLOCKS) if block <= wanted and inputs % block == 0), None)


def quantize_symmetric(weight: torch.Tensor, kind: SymmetricKind, block: int, *, either_sign: bool = False) -> SymmetricMatrix:
    """float [N,K] -> `kind`. block: of int4, K a multiple of it; the others have a scale for each row.

    either_sign: scales of int4 may be negative. TensorRT-RTX takes such scales, TensorRT's parser refuses them.
    """
    rows, inputs = weight.shape
    if kind == "int4":
        blocks = weight.detach().float().reshape(-1, block)
        parts = [_search(part, either_sign) for part in blocks.split(_BLOCKS_AT_A_TIME)]
        values, scales = (torch.cat([part[index] for part in parts]) for index in range(2))
    else:
        block = inputs
        found = [_round_rows(part, kind) for part in weight.detach().float().split(_BLOCKS_AT_A_TIME)]
        values, scales = (torch.cat([part[index] for part in found]) for index in range(2))
    array = values.reshape(rows, inputs).numpy()
    return SymmetricMatrix(kind, block, array.astype(VALUE_DTYPES[kind]), scales.reshape(rows, -1).numpy())


def _round_rows(rows: torch.Tensor, kind: SymmetricKind) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n,K] -> values [n,K] as float32, scales [n,1]: the largest weight of a row becomes the largest value."""
    largest = rows.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / _LARGEST[kind], 1.0)
    scaled = rows / scales
    return (torch.round(scaled) if kind == "int8" else scaled.to(torch.float8_e4m3fn).float()), scales


def _search(blocks: torch.Tensor, either_sign: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [n,block] -> values [n,block] as float32, -8 .. 7, scales [n,1] of the least squared error among those tried."""
    largest = blocks.abs().amax(1, keepdim=True)
    # Of which sign the largest is, towards -8.
    side = torch.where(blocks.amax(1, keepdim=True) == largest, -1.0, 1.0) if either_sign else torch.ones_like(largest)
    best_error = torch.full_like(largest, torch.inf)
    best = (torch.zeros_like(blocks), torch.ones_like(largest))
    for width in _WIDTHS:
        scale = torch.where(largest > 0, side * largest * (width / 7), 1.0)
        values = torch.clamp(torch.round(blocks / scale), -8, 7)
        squares = (values * values).sum(1, keepdim=True)
        fitted = torch.where(squares > 0, (blocks * values).sum(1, keepdim=True) / squares, scale)
        error = (blocks - fitted * values).square_().sum(1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = (torch.where(better, values, best[0]), torch.where(better, fitted, best[1]))
    # With the scale that was found, each to its nearest: what a validation holds it to.
    return torch.clamp(torch.round(blocks / best[1]), -8, 7), best[1]
