"""Invariant I1: any way of cutting the input into calls gives the same logits."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parity.closeness import assert_parity
from tests.parity.tiny_bundles import TARGETS, TinyBundle, feed_in_cuts, text

Bundles = Callable[[str], TinyBundle]
every_target = pytest.mark.parametrize("target", TARGETS)
NAMES = ("chunk 4 native", "chunk 4 streaming", "chunk 8 streaming", "no sinks", "tight streaming")
TOKENS = 70


@cache
def one_by_one(bundle_of: Bundles, name: str, target: str) -> np.ndarray:
    return feed_in_cuts(bundle_of(name).decoder(target), text(TOKENS), [1])


@every_target
@pytest.mark.parametrize("name", NAMES)
def test_chunk_lengths(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    window, expected = bundle.export.window, one_by_one(parity_bundle, name, target)
    for length in (3, window, window + 1, 3 * window, TOKENS):
        assert_parity(feed_in_cuts(bundle.decoder(target), text(TOKENS), [length]), expected, what=f"calls of {length} tokens")


@every_target
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_may_start_anywhere_in_the_ring(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    expected = one_by_one(parity_bundle, name, target)
    for start in range(2 * bundle.geometry.capacity):
        with bundle.decoder(target).stream() as stream:
            if start:
                stream.feed(text(TOKENS)[:start])
            rest = stream.feed(text(TOKENS)[start:], all_logits=True)
        assert_parity(rest, expected[start:], what=f"one call from position {start}")


@every_target
@pytest.mark.parametrize("name", ["chunk 4 native", "chunk 8 streaming"])
@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cuts(parity_bundle: Bundles, name: str, target: str, cuts: list[int]) -> None:
    actual = feed_in_cuts(parity_bundle(name).decoder(target), text(TOKENS), cuts)
    assert_parity(actual, one_by_one(parity_bundle, name, target), what=f"cuts {cuts}")


@pytest.mark.parametrize("name", ["chunk 4 streaming", "tight streaming"])
def test_the_last_logits_are_those_of_the_last_token(parity_bundle: Bundles, name: str) -> None:
    """`feed` without all_logits computes one row only: it must be the last, for prompts of any length."""
    bundle = parity_bundle(name)
    expected = one_by_one(parity_bundle, name, "onnxruntime")
    for length in range(1, TOKENS):
        with bundle.decoder().stream() as stream:
            assert_parity(stream.feed(text(TOKENS)[:length]), expected[length - 1], what=f"prompt of {length}")
