"""Blocks of small integers: what they stand for, how they are packed, and that the search for a grid is worth its time."""

import numpy as np
import pytest
import torch
from sinkring.exporter.quantize import BLOCK, BlockMatrix, copies_of_sums, quantize_blocks, stack
from sinkring.exporter.weight_formats import take_over
from sinkring.models.gguf_blocks import GgufBlocks

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = 0.3 * torch.randn(6, 3 * BLOCK, generator=GENERATOR)
RNG = np.random.default_rng(0)


def squared_error(found: np.ndarray, weight: torch.Tensor) -> float:
    return float(np.square(found - weight.numpy()).sum())


def rounded_by_range(weight: torch.Tensor, bits: int) -> np.ndarray:
    """Plain rounding of each block over its whole range, written down in another way than the code under test."""
    blocks = weight.numpy().reshape(-1, BLOCK).astype(np.float64)
    low, high = np.minimum(blocks.min(1), 0), np.maximum(blocks.max(1), 0)
    scale = (high - low) / (2**bits - 1)
    zero = np.round(-low / scale)
    values = np.clip(np.round(blocks / scale[:, None] + zero[:, None]), 0, 2**bits - 1)
    return ((values - zero[:, None]) * scale[:, None]).reshape(weight.shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_search_beats_plain_rounding(bits: int) -> None:
    found = quantize_blocks(WEIGHT, bits)
    assert found.values.max() < 1 << bits
    assert squared_error(found.dequantized(), WEIGHT) < 0.97 * squared_error(rounded_by_range(WEIGHT, bits), WEIGHT)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_lie_on_a_grid_come_back(bits: int) -> None:
    whole = torch.from_numpy(RNG.integers(0, 1 << bits, (4, 2 * BLOCK)))
    whole[:, 0::BLOCK], whole[:, 1::BLOCK] = 0, (1 << bits) - 1
    weight = (whole - 5) * 0.25
    np.testing.assert_allclose(quantize_blocks(weight, bits).dequantized(), weight, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.7, -0.7])
def test_blocks_of_one_number(value: float) -> None:
    weight = torch.full((1, BLOCK), value)
    np.testing.assert_allclose(quantize_blocks(weight, 4).dequantized(), weight, rtol=1e-6)


def test_packing_puts_the_first_of_two_values_low() -> None:
    found = quantize_blocks(WEIGHT, 4)
    packed = found.packed_values()
    assert packed.shape == (6, 3, BLOCK // 2)
    np.testing.assert_array_equal(packed & 15, found.values.reshape(6, 3, BLOCK)[:, :, 0::2])
    np.testing.assert_array_equal(packed >> 4, found.values.reshape(6, 3, BLOCK)[:, :, 1::2])
    zeros = found.packed_zero_points()
    assert zeros.shape == (6, 2)
    np.testing.assert_array_equal(zeros[:, 0] >> 4, found.zero_points[:, 1])
    np.testing.assert_array_equal(zeros[:, 1], found.zero_points[:, 2])


def q4_1() -> GgufBlocks:
    scales = RNG.random((4, 2), np.float32) + 0.1
    return GgufBlocks("Q4_1", RNG.integers(0, 16, (4, 2 * BLOCK), dtype=np.uint8), scales, -5.3 * scales)


def test_blocks_with_a_minimum_are_taken_over_with_a_residual() -> None:
    blocks = q4_1()
    taken = take_over(blocks, torch.from_numpy(blocks.dequantized()), 4, residuals=True)
    assert taken is not None
    np.testing.assert_array_equal(taken.values, blocks.values)
    np.testing.assert_allclose(taken.dequantized(), blocks.dequantized(), rtol=0, atol=1e-6)
    both = stack([quantize_blocks(WEIGHT[:, : 2 * BLOCK], 4), taken])
    np.testing.assert_array_equal(both.dequantized()[6:], taken.dequantized())


@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 18, 31, 32, 33, 48, 64, 65])
@pytest.mark.parametrize("bits", [4, 8])
def test_residuals_as_weights_of_sums(blocks: int, bits: int) -> None:
    """What all copies of a block's sum are multiplied with is its residual; the blocks themselves stay as they are."""
    values = RNG.integers(0, 1 << bits, (5, blocks * BLOCK), dtype=np.uint8)
    scales, residuals = RNG.random((5, blocks), np.float32), RNG.normal(size=(5, blocks)).astype(np.float32)
    zeros = RNG.integers(0, 1 << bits, (5, blocks), dtype=np.uint8)
    wide = BlockMatrix(bits, values, scales, zeros, residuals).with_residuals_as_weights()
    copies, rest = divmod(wide.shape[1] - blocks * BLOCK, blocks)
    assert (copies, rest) == (copies_of_sums(blocks), 0)
    assert wide.residuals is None
    np.testing.assert_array_equal(wide.values[:, : blocks * BLOCK], values)
    np.testing.assert_array_equal(wide.scales[:, :blocks], scales)
    np.testing.assert_array_equal(wide.zero_points[:, :blocks], zeros)
    tail = (wide.values.astype(np.float64) - np.repeat(wide.zero_points, BLOCK, axis=1)[:, : wide.shape[1]]) * np.repeat(
        wide.scales, BLOCK, axis=1
    )[:, : wide.shape[1]]
    kept = tail[:, blocks * BLOCK :].reshape(5, copies, blocks).sum(axis=1)
    # One step of a grid that holds zero and all residuals, in two digits. An outermost number may be clipped for the sake of the rest.
    step = np.ptp(np.pad(residuals, ((0, 0), (0, 1))), axis=1, keepdims=True) / ((1 << bits) - 1) ** 2
    off = np.abs(kept - residuals) / step
    assert np.sqrt(np.square(off).mean()) <= 0.5
    assert off.max() <= 4


def test_blocks_are_not_taken_over_for_other_weights_bits_or_operators() -> None:
    blocks = q4_1()
    weight = torch.from_numpy(blocks.dequantized())
    assert take_over(blocks, weight + 1e-3, 4, residuals=True) is None
    assert take_over(blocks, weight, 8, residuals=True) is None
    assert take_over(blocks, weight, 4, residuals=False) is None
