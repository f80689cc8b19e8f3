"""Invariant I9: a stream that has run for weeks gives the logits of a young one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sinkring.models.oracle import masked_dense_logits

from tests.parity.ageing import continue_at_age, make_older, shift_towards
from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import TARGETS, TinyBundle, text

Bundles = Callable[[str], TinyBundle]
AGES = (10**3, 10**6, (1 << 24) + 1, 1 << 40)
every_target = pytest.mark.parametrize("target", TARGETS)
every_bundle = pytest.mark.parametrize("name", ["chunk 4 native", "chunk 4 streaming", "chunk 8 streaming", "no sinks", "tight streaming"])


@every_target
@every_bundle
@pytest.mark.parametrize("age", AGES, ids=["1e3", "1e6", "2^24+1", "2^40"])
def test_age_does_not_matter(parity_bundle: Bundles, name: str, target: str, age: int) -> None:
    bundle = parity_bundle(name)
    young = bundle.geometry.capacity + 3
    ids = text(young + 3 * bundle.geometry.slots + 2, seed=3)
    tokens = shift_towards(bundle.geometry, young, age)
    old = continue_at_age(bundle, bundle.decoder(target), ids, young, tokens)
    assert_parity(old, bundle.oracle(ids)[young:], what=f"{name}, {target}, at position {young + tokens}, against the oracle")
    assert_parity(old, continue_at_age(bundle, bundle.decoder(target), ids, young, 0), what="against the young stream")


@every_target
@pytest.mark.parametrize("age", AGES[1:], ids=["1e6", "2^24+1", "2^40"])
def test_an_old_native_stream_is_the_dense_model_at_those_positions(parity_bundle: Bundles, target: str, age: int) -> None:
    bundle = parity_bundle("chunk 4 native")
    young = bundle.geometry.capacity
    ids = text(young + 2 * bundle.geometry.slots, seed=4)
    tokens = shift_towards(bundle.geometry, young, age)
    dense = masked_dense_logits(bundle.model, torch.from_numpy(ids), bundle.export.sinks, bundle.export.window, start_position=tokens)
    old = continue_at_age(bundle, bundle.decoder(target), ids, young, tokens)
    assert_parity(old, dense.numpy()[young:])


def test_controls_are_seen(parity_bundle: Bundles) -> None:
    """An age that the state does not have, and sinks that grew old with the window, are both loud."""
    for name in ("chunk 4 native", "chunk 4 streaming"):
        bundle = parity_bundle(name)
        young, slots = bundle.geometry.capacity, bundle.geometry.slots
        ids = text(young + slots, seed=5)
        expected = bundle.oracle(ids)[young:]
        with bundle.decoder().stream() as stream:
            stream.feed(ids[:young])
            stream._fed += slots
            assert_loudly_wrong(stream.feed(ids[young:], all_logits=True), expected, f"{name}: a position one turn of the ring too late")
    with bundle.decoder().stream() as stream:
        stream.feed(ids[:young])
        sinks = {name: ring[:, :, :3].copy() for name, ring in bundle.decoder().backend.read_row(stream.row).items()}
        make_older(bundle, stream, slots)
        state = bundle.decoder().backend.read_row(stream.row)
        assert all(np.array_equal(state[name][:, :, :3], sinks[name]) for name in state)
        for layer in range(2):
            state[f"cache.{layer}.k"][:, :, :3] = state[f"cache.{layer}.k"][:, :, 3:6]
        bundle.decoder().backend.write_row(stream.row, state)
        assert_loudly_wrong(stream.feed(ids[young:], all_logits=True), expected, "keys of the window in the sinks' place")
