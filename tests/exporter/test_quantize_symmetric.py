"""Rounding to symmetric integers and 8-bit floats: on the grid, no worse than the plain grid, and blocks of the right size."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sinkring.exporter import quantize_symmetric as module
from sinkring.exporter.quantize_symmetric import SymmetricKind, largest_block, quantize_symmetric, stack_symmetric

RNG = np.random.default_rng(0)


def weight(rows: int = 7, inputs: int = 192) -> np.ndarray:
    drawn = RNG.standard_normal((rows, inputs)).astype(np.float32) * np.exp(RNG.standard_normal((rows, 1))).astype(np.float32)
    drawn[2] = 0
    return drawn


def squared(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(a.astype(np.float64) - b).sum())


@pytest.mark.parametrize("block", [32, 64])
def test_four_bits_beat_the_plain_grid_of_seven_steps_to_either_side(block: int) -> None:
    matrix = weight()
    found = quantize_symmetric(torch.from_numpy(matrix), "int4", block)
    assert found.values.dtype == ml_dtypes.int4
    assert found.scales.shape == (7, 192 // block)
    assert np.all(found.scales > 0)
    blocks = matrix.reshape(7, -1, block)
    step = np.abs(blocks).max(-1, keepdims=True) / 7 + 1e-30
    plain = (np.clip(np.round(blocks / step), -7, 7) * step).reshape(matrix.shape)
    assert squared(found.dequantized(), matrix) < 0.97 * squared(plain, matrix)
    np.testing.assert_array_equal(found.dequantized()[2], 0)


def block_errors(seed: int, block: int, either_sign: bool) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors of each block: as found, and of the plain grid of seven steps to either side."""
    drawn = np.random.default_rng(seed)
    matrix = (drawn.standard_t(3, (5, 4 * block)) + drawn.uniform(-1, 1)).astype(np.float32)
    found = quantize_symmetric(torch.from_numpy(matrix), "int4", block, either_sign=either_sign).dequantized()
    blocks = matrix.reshape(-1, block).astype(np.float64)
    step = np.abs(blocks).max(1, keepdims=True) / 7
    return np.square(found.reshape(-1, block) - blocks).sum(1), np.square(np.round(blocks / step) * step - blocks).sum(1)


@given(st.integers(0, 2**32), st.sampled_from([32, 64, 128]), st.booleans())
def test_no_block_is_worse_than_on_the_plain_grid(seed: int, block: int, either_sign: bool) -> None:
    found, plain = block_errors(seed, block, either_sign)
    assert np.all(found <= plain * (1 + 1e-5))


def test_a_search_among_wrong_widths_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WIDTHS", (1.6,))
    found, plain = block_errors(0, 32, True)
    assert np.any(found > plain * (1 + 1e-5))


def test_scales_of_either_sign_put_the_step_that_is_left_on_the_side_of_the_largest() -> None:
    matrix = torch.from_numpy(RNG.standard_normal((64, 576)).astype(np.float32))
    one, either = (quantize_symmetric(matrix, "int4", 32, either_sign=either) for either in (False, True))
    assert np.all(one.scales > 0)
    blocks = matrix.numpy().reshape(64, -1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(2, keepdims=True), 2)[:, :, 0]
    np.testing.assert_array_equal(np.sign(either.scales), -np.sign(largest))
    errors = [squared(found.dequantized(), matrix.numpy()) for found in (one, either)]
    assert errors[1] < 0.93 * errors[0]
    assert (either.values.astype(int) == -8).sum() > 1.5 * (one.values.astype(int) == -8).sum()


def test_eight_bits_are_the_nearest_of_each_rows_grid() -> None:
    matrix = weight()
    found = quantize_symmetric(torch.from_numpy(matrix), "int8", 32)
    assert (found.block, found.scales.shape) == (192, (7, 1))
    step = np.abs(matrix).max(1, keepdims=True) / 127
    assert np.abs(found.dequantized() - matrix).max(1) == pytest.approx(np.minimum(step[:, 0] / 2, np.inf), rel=0.1, abs=1e-9)


def test_fp8_is_the_nearest_number_of_three_bits_of_mantissa() -> None:
    matrix = weight()
    found = quantize_symmetric(torch.from_numpy(matrix), "fp8", 32)
    grid = np.unique(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    grid = grid[np.isfinite(grid)]
    for row, scale, values in zip(matrix, found.scales[:, 0], found.values.astype(np.float32), strict=True):
        nearest = np.abs((row / scale)[:, None] - grid).min(1)
        np.testing.assert_allclose(np.abs(row / scale - values), nearest, atol=1e-4)
    assert np.abs(found.values.astype(np.float32)).max(1).tolist() == [448, 448, 0, 448, 448, 448, 448]


@pytest.mark.parametrize(("inputs", "wanted", "block"), [(576, 128, 64), (576, 32, 32), (1536, 128, 128), (96, 64, 32), (72, 64, None)])
def test_blocks_divide_the_inputs(inputs: int, wanted: int, block: int | None) -> None:
    assert largest_block(inputs, wanted) == block


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_a_stack_holds_each_as_it_was(kind: SymmetricKind) -> None:
    parts = [quantize_symmetric(torch.from_numpy(weight(rows)), kind, 64) for rows in (3, 5)]
    np.testing.assert_array_equal(stack_symmetric(parts).dequantized(), np.concatenate([part.dequantized() for part in parts]))
