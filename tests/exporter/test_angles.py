"""Rotary angles at any age: the tables and the traced look-up against mpmath."""

from functools import cache

import mpmath  # type: ignore[import-untyped]  # it ships no types
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from sinkring.exporter.angles import DIGIT_BITS, DIGITS, POSITION_LIMIT, Angles, angle_tables

# Three rows, each rounded to float32 (6e-8), combined by two rotations that round again: 3.2e-7 at worst.
TOLERANCE = 4e-7

# float32 values, as a model holds them: SmolLM2's and Llama 2's 32 or so frequencies, and Llama 3's far slower last ones.
FREQUENCIES = {
    f"base {base}": (1.0 / base ** (np.arange(0, size, 2) / size)).astype(np.float32) for base, size in ((1e4, 16), (1e5, 64), (5e5, 128))
}
every_frequency = pytest.mark.parametrize("frequencies", list(FREQUENCIES.values()), ids=list(FREQUENCIES))


def positions() -> list[int]:
    random = np.random.default_rng(0)
    edges = [0, 1, *(1 << (DIGIT_BITS * digit) for digit in range(1, DIGITS)), 10**6, (1 << 24) + 1, 1 << 40, POSITION_LIMIT - 1]
    around = [edge - 1 for edge in edges if edge > 1]
    return [*edges, *around, *(int(position) for position in random.integers(0, POSITION_LIMIT, 24))]


@cache
def exact(frequency: float, position: int) -> tuple[float, float]:
    """cos and sin of position * frequency, with 60 digits on the way."""
    with mpmath.workdps(60):
        angle = mpmath.mpf(position) * mpmath.mpf(frequency)
        return float(mpmath.cos(angle)), float(mpmath.sin(angle))


def expected(frequencies: np.ndarray, at: list[int]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array([[exact(float(frequency), position) for frequency in frequencies] for position in at])
    return both[..., 0], both[..., 1]


@cache
def traced(name: str) -> ort.InferenceSession:
    """The look-up as it comes out of the tracer: positions int64 [1,T] -> cos, sin."""
    program = torch.onnx.export(
        Angles(torch.from_numpy(FREQUENCIES[name])),
        (torch.zeros(1, 3, dtype=torch.int64),),
        dynamo=True,
        opset_version=24,
        input_names=["positions"],
        output_names=["cos", "sin"],
        dynamic_shapes=({1: torch.export.Dim("T", min=1)},),
        verbose=False,
    )
    assert program is not None
    return ort.InferenceSession(ir.to_proto(program.model).SerializeToString(), providers=["CPUExecutionProvider"])


def test_the_limit_is_past_any_stream() -> None:
    assert POSITION_LIMIT == 1 << 44


@every_frequency
def test_tables_hold_the_float32_nearest_to_each_angle(frequencies: np.ndarray) -> None:
    tables = angle_tables(frequencies)
    assert tables.shape == (DIGITS, 1 << DIGIT_BITS, 2 * len(frequencies))
    assert tables.dtype == np.float32
    random = np.random.default_rng(1)
    for digit in range(DIGITS):
        rows = [0, 1, (1 << DIGIT_BITS) - 1, *(int(row) for row in random.integers(0, 1 << DIGIT_BITS, 8))]
        cos, sin = expected(frequencies, [row << (DIGIT_BITS * digit) for row in rows])
        # Half a unit in the last place of 1.0 is 6e-8.
        np.testing.assert_allclose(tables[digit, rows], np.concatenate([cos, sin], axis=1), rtol=0, atol=6.1e-8)


@pytest.mark.parametrize("name", list(FREQUENCIES))
def test_look_up_in_onnx_runtime_is_exact_at_any_age(name: str) -> None:
    at = positions()
    cos, sin = traced(name).run(None, {"positions": np.array([at])})
    for actual, right in zip((cos[0], sin[0]), expected(FREQUENCIES[name], at), strict=True):
        errors = np.abs(actual - right).max(axis=1)
        worst = int(errors.argmax())
        assert errors[worst] <= TOLERANCE, f"position {at[worst]}: off by {errors[worst]:.2g}, allowed {TOLERANCE:.2g}"


def test_position_zero_turns_nothing() -> None:
    """Exactly: a sink's angle, and that of a query that is not turned back, must add no rounding."""
    cos, sin = traced("base 100000.0").run(None, {"positions": np.zeros((1, 1), np.int64)})
    assert np.all(cos == 1)
    assert np.all(sin == 0)


def test_float32_angles_would_not_pass() -> None:
    frequencies, at = FREQUENCIES["base 10000.0"], [10**6, (1 << 24) + 1]
    angle = np.array(at, np.float32)[:, None] * frequencies
    errors = np.abs(np.cos(angle) - expected(frequencies, at)[0]).max(axis=1)
    assert np.all(errors > 1000 * TOLERANCE)
