"""bfloat16 caches, alone and with bfloat16 weights: the oracle's logits within what rounding does, no further off at any age."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sinkring.exporter.export import export_decoder
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.runtime.bfloat16 import from_host
from sinkring.runtime.decoder import open_bundle
from sinkring.runtime.errors import BundleError

from tests.models.tiny import tiny_llama
from tests.models.tiny_families import tiny_model
from tests.parity.ageing import continue_at_age, shift_towards
from tests.parity.closeness import BFLOAT16, BFLOAT16_CACHES, FLOAT16, FLOAT32, assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import BRAIN_EXPORTS, MODELS, TARGETS, TinyBundle, feed_in_cuts, round_weights, text

Bundles = Callable[[str], TinyBundle]
ONE_ROW = [name for name, export in BRAIN_EXPORTS.items() if export.batch == 1]
every_target = pytest.mark.parametrize("target", TARGETS)


def tolerance(name: str) -> float:
    return BFLOAT16 if name.endswith("all bf16") else BFLOAT16_CACHES


@every_target
@pytest.mark.parametrize("name", BRAIN_EXPORTS)
def test_logits_are_those_of_the_oracle(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    ids = text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(target), ids, (1, 3, 2, 9))
    expected = bundle.oracle(ids)
    assert_parity(actual, expected, tolerance(name), f"{name}, {target}")
    scale = np.abs(expected).max()
    assert np.abs(actual - expected).mean() <= tolerance(name) / 8 * scale, "rounding is as often up as down"
    rounding = FLOAT16 if name.endswith("all bf16") else 10 * FLOAT32
    assert np.abs(actual - expected).max() > rounding * scale, "nothing is bfloat16"


@pytest.mark.parametrize("name", [name for name in ONE_ROW if name.endswith("all bf16")])
def test_no_further_off_than_eager_pytorch_in_bfloat16(parity_bundle: Bundles, name: str) -> None:
    bundle = parity_bundle(name)
    ids = text(bundle.wrapped_thrice)
    expected = bundle.oracle(ids)
    oracle = streaming_logits if bundle.export.policy == "streaming" else masked_dense_logits
    model = tiny_llama(**MODELS[bundle.export.model])
    eager = oracle(model, torch.from_numpy(ids), bundle.export.sinks, bundle.export.window, narrow=torch.bfloat16)
    assert eager.dtype == torch.bfloat16
    ours = np.abs(feed_in_cuts(bundle.decoder(), ids, (1,)) - expected).mean()
    assert ours <= 1.25 * np.abs(eager.float().numpy() - expected).mean()


@pytest.mark.parametrize("name", ONE_ROW)
def test_controls_are_seen(parity_bundle: Bundles, name: str) -> None:
    bundle = parity_bundle(name)
    export, ids = bundle.export, text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(), ids, (3,))
    other = {"native": "streaming", "streaming": "native"}[export.policy]
    for what, wrong in {
        "window one shorter": bundle.oracle(ids, window=export.window - 1),
        "window one longer": bundle.oracle(ids, window=export.window + 1),
        "one sink less": bundle.oracle(ids, sinks=export.sinks - 1),
        "the other policy": bundle.oracle(ids, policy=other),  # type: ignore[arg-type]
    }.items():
        assert_loudly_wrong(actual, wrong, what, times=1.5 * tolerance(name) / FLOAT32)


@every_target
@pytest.mark.parametrize("name", ONE_ROW)
def test_the_error_does_not_grow_with_age(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    young = bundle.geometry.capacity + 3
    ids = text(young + 3 * bundle.geometry.slots + 2, seed=3)
    expected = bundle.oracle(ids)[young:]
    errors = []
    for age in (0, 10**3, (1 << 24) + 1, 1 << 40):
        tokens = shift_towards(bundle.geometry, young, age) if age else 0
        old = continue_at_age(bundle, bundle.decoder(target), ids, young, tokens)
        # Ageing rounds the keys a second time.
        assert_parity(old, expected, 2 * tolerance(name), f"{name}, {target}, at position {young + tokens}")
        errors.append(float(np.abs(old - expected).mean()))
    assert max(errors[1:]) <= 1.5 * errors[0], f"mean errors by age: {errors}"


def test_rows_do_not_touch_each_other(parity_bundle: Bundles) -> None:
    decoder, ids = parity_bundle("two rows, all bf16").decoder(), text(40)
    with decoder.stream() as alone:
        expected = [alone.feed([token]) for token in ids]
    with decoder.stream() as one, decoder.stream() as two:
        for step, token in enumerate(ids):
            np.testing.assert_array_equal(one.feed([token]), expected[step])
            if step % 3 == 0:
                two.feed(text(2, seed=step))
            if step % 7 == 0:
                two.reset()


def test_a_snapshot_and_a_fork_continue_bit_for_bit(parity_bundle: Bundles, tmp_path: Path) -> None:
    bundle = parity_bundle("two rows, all bf16")
    ids = text(60)
    with bundle.decoder().stream() as stream:
        stream.feed(ids[:30])
        stream.snapshot(tmp_path / "brain.snapshot")
        with stream.fork() as twin:
            forked = twin.feed(ids[30:], all_logits=True)
        expected = stream.feed(ids[30:], all_logits=True)
    np.testing.assert_array_equal(forked, expected)
    with bundle.decoder().restore(tmp_path / "brain.snapshot") as stream:
        np.testing.assert_array_equal(stream.feed(ids[30:], all_logits=True), expected)
    with pytest.raises(BundleError, match="another bundle"):
        parity_bundle("two rows, fp16").decoder().restore(tmp_path / "brain.snapshot")


def test_half_the_bytes_and_what_they_hold(parity_bundle: Bundles) -> None:
    brain, full = (parity_bundle(name) for name in ("chunk 4 native, bf16", "chunk 4 native"))
    made, plain = brain.decoder().manifest, full.decoder().manifest
    assert made.cache_bytes * 2 == plain.cache_bytes
    assert made.cache_bytes == made.cache_bytes_formula
    assert (made.dtype, made.cache_dtype) == ("float32", "bfloat16")
    assert {graph.widened for graph in made.graphs} == {None}, "what only stores bfloat16 runs as it is"
    ids = text(10)
    rows = []
    for bundle in (brain, full):
        with bundle.decoder().stream() as stream:
            stream.feed(ids)
            rows.append(bundle.decoder().backend.read_row(stream.row)["cache.0.k"])
    assert rows[0].dtype == np.uint16
    np.testing.assert_allclose(from_host(rows[0], "bfloat16"), rows[1], rtol=2**-8, atol=0)


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_families_in_bfloat16(tmp_path: Path, family: str) -> None:
    """Norms that multiply in float32, softcaps, experts: no type meets another one."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", sinks=2, window=6, chunk=3, dtype="bf16", targets=TARGETS)
    round_weights(model, torch.bfloat16)
    ids = text(40)
    expected = streaming_logits(model, torch.from_numpy(ids), 2, 6).numpy()
    for target in TARGETS:
        with open_bundle(tmp_path / "bundle", target=target, threads=1) as decoder:
            actual = feed_in_cuts(decoder, ids, (1, 3, 2))
        # A router that chooses another expert, as eager PyTorch's does at other tokens, moves the logits of that one token further.
        near = np.abs(actual - expected).max(axis=1) <= BFLOAT16 * np.abs(expected).max()
        assert np.count_nonzero(~near) <= 1, f"{family}, {target}"
        assert_parity(actual[near], expected[near], BFLOAT16, f"{family}, {target}")
