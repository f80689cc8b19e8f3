"""Rotary angles at any age of a stream.

fp32(position * inv_freq) is wrong by 0.06 rad at position 1e6 and by more than a turn later. Here a position is split into digits of
DIGIT_BITS bits, each digit looks up a row of exact cosines and sines, and the rows are combined by cos(a+b), sin(a+b). Positions
below POSITION_LIMIT are exact to about four float32 roundings.

The tables are computed from the model's own inv_freq (the float32 values are taken as exact) in fixed point: a turn is 2**64, so the
phase of row k is k * step modulo 2**64, which unsigned integers compute exactly.
"""

from fractions import Fraction

import numpy as np
import torch
from torch.onnx.ops import symbolic

# Four digits of 11 bits say as much as three of 14 with a sixth of the tables, which every graph holds.
DIGIT_BITS = 11
DIGITS = 4
POSITION_LIMIT = 1 << (DIGIT_BITS * DIGITS)
_PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
_TURN = 1 << 64


def angle_tables(inv_freq: np.ndarray) -> np.ndarray:
    """inv_freq [R/2], radians per token -> float32 [DIGITS, 2**DIGIT_BITS, R]: cosines, then sines, of k * 2**(DIGIT_BITS * d) tokens."""
    rows = np.arange(1 << DIGIT_BITS, dtype=np.uint64)[:, None]
    tables = []
    for digit in range(DIGITS):
        turns = [Fraction(float(freq)) * (1 << (DIGIT_BITS * digit)) / (2 * _PI) for freq in inv_freq]
        steps = np.array([round((turn % 1) * _TURN) % _TURN for turn in turns], dtype=np.uint64)
        phase = (rows * steps[None, :]).astype(np.int64)  # wraps: whole turns fall away; signed, so |angle| <= pi
        angle = phase * (2 * np.pi / _TURN)
        tables.append(np.concatenate([np.cos(angle), np.sin(angle)], axis=1))
    return np.stack(tables).astype(np.float32)


class Angles(torch.nn.Module):
    """Traces the table lookup into the graph. `forward(positions)`: int64 [...] -> (cos, sin), each float32 [..., R/2]."""

    radix: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        tables = angle_tables(inv_freq.detach().cpu().numpy())
        self.pairs = inv_freq.numel()
        for digit in range(DIGITS):
            self.register_buffer(f"digit{digit}", torch.from_numpy(tables[digit]))
        self.register_buffer("radix", torch.tensor(1 << DIGIT_BITS, dtype=torch.int64))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = [*positions.shape, 2 * self.pairs]
        rows, rest = [], positions
        for digit in range(DIGITS):
            index = rest
            if digit < DIGITS - 1:
                # Positions are never negative, so ONNX's truncating Div and its Mod agree with floor division.
                index, rest = _integer("Mod", rest, self.radix), _integer("Div", rest, self.radix)
            table = getattr(self, f"digit{digit}")
            rows.append(symbolic("Gather", [table, index], {"axis": 0}, dtype=torch.float32, shape=shape, version=24))
        cos, sin = self._halves(rows[0])
        for row in rows[1:]:
            c, s = self._halves(row)
            cos, sin = cos * c - sin * s, sin * c + cos * s
        return cos, sin

    def _halves(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return row[..., : self.pairs], row[..., self.pairs :]


def _integer(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return symbolic(op, [a, b], dtype=torch.int64, shape=a.shape, version=24)
