"""The runtime's bfloat16 against another one's, over every kind of number."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sinkring.runtime.bfloat16 import element_type, from_host, host_dtype, round_to_bfloat16, to_host, widen_bfloat16


@given(st.integers(0, 2**32 - 1))
def test_rounds_as_ml_dtypes_does(bits: int) -> None:
    number = np.array([bits], np.uint32).view(np.float32)
    ours, theirs = widen_bfloat16(round_to_bfloat16(number)), number.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("number", "rounded"),
    [
        (1 + 2**-8, 1.0),  # a tie goes to the even one, down here
        (1 + 3 * 2**-8, 1 + 2**-6),  # and up here
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (3.4e38, np.inf),
        (-np.inf, -np.inf),
        (2.0**-130, 2.0**-130),  # subnormal
    ],
)
def test_named_cases(number: float, rounded: float) -> None:
    np.testing.assert_allclose(widen_bfloat16(round_to_bfloat16(number)), rounded, rtol=0)


def test_every_bit_pattern_widens_and_comes_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = widen_bfloat16(bits)
    np.testing.assert_array_equal(wide, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    same = ~np.isnan(wide)
    np.testing.assert_array_equal(round_to_bfloat16(wide)[same], bits[same])
    assert np.isnan(widen_bfloat16(round_to_bfloat16(wide)[~same])).all()


def test_other_types_are_numpys_own() -> None:
    assert (host_dtype("float16"), host_dtype("bfloat16")) == (np.float16, np.uint16)
    assert (element_type("float16"), element_type("bfloat16")) == (np.float16, 16)
    array = to_host([1.5, -2], "float16")
    assert array.dtype == np.float16
    assert from_host(array, "float16") is array
    assert from_host(to_host(np.nan, "bfloat16"), "bfloat16").shape == ()
