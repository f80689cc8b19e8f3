"""float16 caches, alone and with float16 weights: the oracle's logits within what rounding does, at any age; all else exactly."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from sinkring.exporter.export import export_decoder
from sinkring.models.oracle import streaming_logits
from sinkring.runtime.decoder import open_bundle
from sinkring.runtime.errors import BundleError

from tests.models.tiny_families import tiny_model
from tests.parity.ageing import continue_at_age, shift_towards
from tests.parity.closeness import FLOAT16, FLOAT16_CACHES, FLOAT32, assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import HALF_EXPORTS, HALF_ROPE_EXPORTS, TARGETS, TinyBundle, feed_in_cuts, round_weights, text

Bundles = Callable[[str], TinyBundle]
ONE_ROW = [name for name, export in HALF_EXPORTS.items() if export.batch == 1]


def tolerance(name: str) -> float:
    return FLOAT16 if name.endswith("all fp16") else FLOAT16_CACHES


every_target = pytest.mark.parametrize("target", TARGETS)


@every_target
@pytest.mark.parametrize("name", HALF_EXPORTS)
def test_logits_are_those_of_the_oracle(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    ids = text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(target), ids, (1, 3, 2, 9))
    expected = bundle.oracle(ids)
    assert_parity(actual, expected, tolerance(name), f"{name}, {target}")
    assert np.abs(actual - expected).max() > FLOAT32 * np.abs(expected).max(), "the caches are not float16"
    # However the text is cut, the same keys are stored, but for roundings of sums that fall to the other side of a half.
    assert_parity(feed_in_cuts(bundle.decoder(target), ids, (2,)), actual, tolerance(name), "cut otherwise")


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
        assert_loudly_wrong(actual, wrong, what, times=4 * tolerance(name) / FLOAT32)


@every_target
@pytest.mark.parametrize("name", ONE_ROW)
@pytest.mark.parametrize("age", [10**3, (1 << 24) + 1, 1 << 40], ids=["1e3", "2^24+1", "2^40"])
def test_age_does_not_matter(parity_bundle: Bundles, name: str, target: str, age: int) -> None:
    bundle = parity_bundle(name)
    young = bundle.geometry.capacity + 3
    ids = text(young + 3 * bundle.geometry.slots + 2, seed=3)
    tokens = shift_towards(bundle.geometry, young, age)
    old = continue_at_age(bundle, bundle.decoder(target), ids, young, tokens)
    # Ageing rounds the keys a second time.
    assert_parity(old, bundle.oracle(ids)[young:], 2 * tolerance(name), f"{name}, {target}, at position {young + tokens}")


@pytest.mark.parametrize("name", HALF_ROPE_EXPORTS)
def test_age_does_not_matter_to_any_kind_of_rope(parity_bundle: Bundles, name: str) -> None:
    bundle = parity_bundle(name)
    young = bundle.geometry.capacity + 3
    ids = text(young + bundle.geometry.slots + 2, seed=4)
    expected = bundle.oracle(ids)[young:]
    for age in (10**3, 1 << 40):
        tokens = shift_towards(bundle.geometry, young, age)
        old = continue_at_age(bundle, bundle.decoder(), ids, young, tokens)
        assert_parity(old, expected, 2 * tolerance(name), f"{name}, at position {young + tokens}")


def test_rows_do_not_touch_each_other(parity_bundle: Bundles) -> None:
    bundle = parity_bundle("two rows, fp16")
    decoder, ids = bundle.decoder(), text(40)
    with decoder.stream() as alone:
        expected = [alone.feed([token]) for token in ids]
    with decoder.stream() as one, decoder.stream() as two:
        for step, token in enumerate(ids):
            np.testing.assert_array_equal(one.feed([token]), expected[step])
            if step % 3 == 0:
                two.feed(text(2, seed=step))
            if step % 7 == 0:
                two.reset()


def test_a_snapshot_continues_bit_for_bit_and_only_in_caches_of_its_type(parity_bundle: Bundles, tmp_path: Path) -> None:
    bundle = parity_bundle("chunk 4 native, fp16")
    ids = text(60)
    with bundle.decoder().stream() as stream:
        stream.feed(ids[:30])
        stream.snapshot(tmp_path / "half.snapshot")
        expected = stream.feed(ids[30:], all_logits=True)
    with bundle.decoder().restore(tmp_path / "half.snapshot") as stream:
        np.testing.assert_array_equal(stream.feed(ids[30:], all_logits=True), expected)
    full = parity_bundle("chunk 4 native")
    with pytest.raises(BundleError, match="another bundle"):
        full.decoder().restore(tmp_path / "half.snapshot")


def test_half_the_bytes(parity_bundle: Bundles) -> None:
    half, full = (parity_bundle(name).decoder().manifest for name in ("chunk 4 native, fp16", "chunk 4 native"))
    assert half.cache_bytes * 2 == full.cache_bytes
    assert half.cache_bytes == half.cache_bytes_formula
    assert (half.dtype, half.cache_dtype, full.cache_dtype) == ("float32", "float16", "float32")
    state = half.states[0]
    assert parity_bundle("chunk 4 native, fp16").decoder().backend.read_row(0)[state.name].dtype == np.float16


def test_angles_are_those_of_the_float32_model(parity_bundle: Bundles) -> None:
    """Frequencies rounded to float16 would be another model's, the further off the older a stream is."""
    tables = []
    for name in ("chunk 4 native, all fp16", "chunk 4 native"):
        graph = onnx.load(parity_bundle(name).path / "decode.heads.onnx").graph
        tables.append({tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if "digit" in tensor.name})
    half, full = tables
    assert len(full) == 4
    for name, table in full.items():
        np.testing.assert_array_equal(half[name], table)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral", "gptj"])
def test_families_in_float16(tmp_path: Path, family: str) -> None:
    """Norms that multiply in float32, learned sink logits, experts, interleaved pairs: no type meets another one."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", sinks=2, window=6, chunk=3, dtype="fp16", targets=TARGETS)
    round_weights(model, torch.float16)
    ids = text(40)
    expected = streaming_logits(model, torch.from_numpy(ids), 2, 6).numpy()
    for target in TARGETS:
        with open_bundle(tmp_path / "bundle", target=target, threads=1) as decoder:
            assert_parity(feed_in_cuts(decoder, ids, (1, 3, 2)), expected, FLOAT16, f"{family}, {target}")
