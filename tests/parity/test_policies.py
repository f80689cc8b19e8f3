"""Invariants I2 and I3: at every step of a stream, past three wraps, a bundle gives the logits of eager PyTorch."""

from collections.abc import Callable

import pytest
import torch
from sinkring.models.oracle import streaming_logits_stepwise
from sinkring.runtime.manifest import Policy

from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import EXPORTS, SINGLE_ROW, TARGETS, TinyBundle, feed_in_cuts, text

Bundles = Callable[[str], TinyBundle]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("cuts", [(1,), (1000,), (1, 3, 2, 9)], ids=["tokens", "whole", "mixed"])
def test_logits_are_those_of_the_oracle(parity_bundle: Bundles, name: str, target: str, cuts: tuple[int, ...]) -> None:
    bundle = parity_bundle(name)
    ids = text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(target), ids, cuts)
    assert_parity(actual, bundle.oracle(ids), what=f"{name}, {target}, cuts {cuts}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in SINGLE_ROW if EXPORTS[name].policy == "streaming"])
def test_streaming_is_the_evicting_cache_of_the_paper(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    ids = text(bundle.wrapped_thrice, seed=1)
    expected = streaming_logits_stepwise(bundle.model, torch.from_numpy(ids), bundle.export.sinks, bundle.export.window)
    assert_parity(feed_in_cuts(bundle.decoder(target), ids, [2, 1]), expected.numpy())


@pytest.mark.parametrize("name", SINGLE_ROW)
def test_controls_are_seen(parity_bundle: Bundles, name: str) -> None:
    """Oracles that are wrong in one thing: a bundle that agreed with one of them would be wrong in the same."""
    bundle = parity_bundle(name)
    export, ids = bundle.export, text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(), ids, [3])
    assert_loudly_wrong(actual, bundle.oracle(ids, window=export.window + 1), "a window one longer")
    assert_loudly_wrong(actual, bundle.oracle(ids, window=export.window - 1), "a window one shorter")
    if export.sinks:
        assert_loudly_wrong(actual, bundle.oracle(ids, sinks=export.sinks - 1, window=export.window + 1), "a sink that is an old token")
        assert_loudly_wrong(actual, bundle.oracle(ids, sinks=export.sinks - 1), "a missing sink")
        other: Policy = "native" if export.policy == "streaming" else "streaming"
        assert_loudly_wrong(actual, bundle.oracle(ids, policy=other), f"positions of the {other} policy")


@pytest.mark.parametrize("name", ["chunk 4 native", "chunk 4 streaming"])
def test_a_decoder_that_takes_positions_from_slots_is_seen(parity_bundle: Bundles, name: str) -> None:
    bundle = parity_bundle(name)
    ids, backend = text(bundle.wrapped_thrice), bundle.decoder().backend
    with bundle.decoder().stream() as stream:
        wrap = bundle.geometry.capacity
        stream.feed(ids[:wrap])
        slot = bundle.geometry.slot(wrap)
        right = backend.read_row(stream.row)
        wrong = backend.prefill(stream.row, ids[wrap : wrap + 1], slot, (slot,), 1).copy()
        assert_loudly_wrong(wrong, bundle.oracle(ids)[wrap : wrap + 1], "the slot passed as the position")
        backend.write_row(stream.row, right)
        again = backend.prefill(stream.row, ids[wrap : wrap + 1], wrap, (slot,), 1)
        assert_parity(again, bundle.oracle(ids)[wrap : wrap + 1])
