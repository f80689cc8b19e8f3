"""Caches of 16 bits, and weights of 16 bits, too: the oracle's logits within what rounding does, at any age; all else exactly.

float16 and bfloat16 go through the same tests, each with limits of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from sinkring.exporter.export import export_decoder
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.runtime.bfloat16 import from_host
from sinkring.runtime.decoder import open_bundle
from sinkring.runtime.errors import BundleError

from tests.models.tiny import tiny_llama
from tests.models.tiny_families import tiny_model
from tests.parity.ageing import continue_at_age, shift_towards
from tests.parity.closeness import BFLOAT16, BFLOAT16_CACHES, FLOAT16, FLOAT16_CACHES, FLOAT32, assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import (
    MODELS,
    NARROW_EXPORTS,
    NARROW_ROPE_EXPORTS,
    TARGETS,
    TinyBundle,
    feed_in_cuts,
    round_weights,
    text,
)

Bundles = Callable[[str], TinyBundle]


@dataclass(frozen=True)
class Narrow:
    """What is of 16 bits, and its limits.

    Of the largest logit: tolerance is the largest difference that passes, rounding what it must exceed, or nothing is rounded, and control
    what a wrong oracle must. kept: how far a stored key may be from the float32 one, of itself.
    """

    torch_dtype: torch.dtype
    tolerance: float
    rounding: float
    control: float
    kept: float


CASES = {
    "fp16": Narrow(torch.float16, FLOAT16_CACHES, FLOAT32, 4 * FLOAT16_CACHES, 2**-11),
    "all fp16": Narrow(torch.float16, FLOAT16, FLOAT32, 4 * FLOAT16, 2**-11),
    "bf16": Narrow(torch.bfloat16, BFLOAT16_CACHES, 10 * FLOAT32, 1.5 * BFLOAT16_CACHES, 2**-8),
    "all bf16": Narrow(torch.bfloat16, BFLOAT16, FLOAT16, 1.5 * BFLOAT16, 2**-8),
}
ONE_ROW = [name for name, export in NARROW_EXPORTS.items() if export.batch == 1]
TWO_ROWS = [name for name, export in NARROW_EXPORTS.items() if export.batch == 2]
every_target = pytest.mark.parametrize("target", TARGETS)


def case_of(name: str) -> Narrow:
    """Of a bundle's name, which ends with it."""
    return CASES[name.rpartition(", ")[2]]


@every_target
@pytest.mark.parametrize("name", NARROW_EXPORTS)
def test_logits_are_those_of_the_oracle(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle, case = parity_bundle(name), case_of(name)
    ids = text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(target), ids, (1, 3, 2, 9))
    expected = bundle.oracle(ids)
    assert_parity(actual, expected, case.tolerance, f"{name}, {target}")
    error, scale = np.abs(actual - expected), np.abs(expected).max()
    assert error.mean() <= case.tolerance / 8 * scale, "rounding is as often up as down"
    assert error.max() > case.rounding * scale, "nothing is rounded to 16 bits"
    # However the text is cut, the same keys are stored, but for roundings of sums that fall to the other side of a half.
    assert_parity(feed_in_cuts(bundle.decoder(target), ids, (2,)), actual, case.tolerance, "cut otherwise")


@pytest.mark.parametrize("name", [name for name in ONE_ROW if NARROW_EXPORTS[name].dtype != "fp32"])
def test_no_further_off_than_eager_pytorch_in_the_same_type(parity_bundle: Bundles, name: str) -> None:
    bundle, narrow = parity_bundle(name), case_of(name).torch_dtype
    ids = text(bundle.wrapped_thrice)
    expected = bundle.oracle(ids)
    oracle = streaming_logits if bundle.export.policy == "streaming" else masked_dense_logits
    model = tiny_llama(**MODELS[bundle.export.model])
    eager = oracle(model, torch.from_numpy(ids), bundle.export.sinks, bundle.export.window, narrow=narrow)
    assert eager.dtype == narrow
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
        assert_loudly_wrong(actual, wrong, what, times=case_of(name).control / FLOAT32)


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
        assert_parity(old, expected, 2 * case_of(name).tolerance, f"{name}, {target}, at position {young + tokens}")
        errors.append(float(np.abs(old - expected).mean()))
    assert max(errors[1:]) <= 1.5 * errors[0], f"mean errors by age: {errors}"


@pytest.mark.parametrize("name", NARROW_ROPE_EXPORTS)
def test_age_does_not_matter_to_any_kind_of_rope(parity_bundle: Bundles, name: str) -> None:
    bundle = parity_bundle(name)
    young = bundle.geometry.capacity + 3
    ids = text(young + bundle.geometry.slots + 2, seed=4)
    expected = bundle.oracle(ids)[young:]
    for age in (10**3, 1 << 40):
        tokens = shift_towards(bundle.geometry, young, age)
        old = continue_at_age(bundle, bundle.decoder(), ids, young, tokens)
        assert_parity(old, expected, 2 * case_of(name).tolerance, f"{name}, at position {young + tokens}")


@pytest.mark.parametrize("name", TWO_ROWS)
def test_rows_do_not_touch_each_other(parity_bundle: Bundles, name: str) -> None:
    decoder, ids = parity_bundle(name).decoder(), text(40)
    with decoder.stream() as alone:
        expected = [alone.feed([token]) for token in ids]
    with decoder.stream() as one, decoder.stream() as two:
        for step, token in enumerate(ids):
            np.testing.assert_array_equal(one.feed([token]), expected[step])
            if step % 3 == 0:
                two.feed(text(2, seed=step))
            if step % 7 == 0:
                two.reset()


@pytest.mark.parametrize("name", TWO_ROWS)
def test_a_snapshot_and_a_fork_continue_bit_for_bit_and_only_in_caches_of_their_type(
    parity_bundle: Bundles, tmp_path: Path, name: str
) -> None:
    bundle = parity_bundle(name)
    ids = text(60)
    with bundle.decoder().stream() as stream:
        stream.feed(ids[:30])
        stream.snapshot(tmp_path / "narrow.snapshot")
        with stream.fork() as twin:
            forked = twin.feed(ids[30:], all_logits=True)
        expected = stream.feed(ids[30:], all_logits=True)
    np.testing.assert_array_equal(forked, expected)
    with bundle.decoder().restore(tmp_path / "narrow.snapshot") as stream:
        np.testing.assert_array_equal(stream.feed(ids[30:], all_logits=True), expected)
    (other,) = {*TWO_ROWS} - {name}
    with pytest.raises(BundleError, match="another bundle"):
        parity_bundle(other).decoder().restore(tmp_path / "narrow.snapshot")


@pytest.mark.parametrize(("dtype", "cache_dtype", "on_host"), [("fp16", "float16", np.float16), ("bf16", "bfloat16", np.uint16)])
def test_half_the_bytes_and_what_they_hold(parity_bundle: Bundles, dtype: str, cache_dtype: str, on_host: type) -> None:
    narrow, full = (parity_bundle(name) for name in (f"chunk 4 native, {dtype}", "chunk 4 native"))
    made, plain = narrow.decoder().manifest, full.decoder().manifest
    assert made.cache_bytes * 2 == plain.cache_bytes
    assert made.cache_bytes == made.cache_bytes_formula
    assert (made.dtype, made.cache_dtype, plain.cache_dtype) == ("float32", cache_dtype, "float32")
    assert {graph.widened for graph in made.graphs} == {None}, "what only stores 16 bits runs as it is"
    rows = []
    for bundle in (narrow, full):
        with bundle.decoder().stream() as stream:
            stream.feed(text(10))
            rows.append(bundle.decoder().backend.read_row(stream.row)["cache.0.k"])
    assert rows[0].dtype == on_host
    # Layer 0's: what later layers store was made from rounded keys.
    np.testing.assert_allclose(from_host(rows[0], cache_dtype), rows[1], rtol=CASES[dtype].kept, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_angles_are_those_of_the_float32_model(parity_bundle: Bundles, dtype: str) -> None:
    """Frequencies rounded to 16 bits would be another model's, the further off the older a stream is."""
    tables = []
    for name in (f"chunk 4 native, all {dtype}", "chunk 4 native"):
        graph = onnx.load(parity_bundle(name).path / "decode.heads.onnx").graph
        tables.append({tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if "digit" in tensor.name})
    narrow, full = tables
    assert len(full) == 4
    for name, table in full.items():
        np.testing.assert_array_equal(narrow[name], table)


@pytest.mark.parametrize(
    ("dtype", "family"),
    [("fp16", "gemma2"), ("fp16", "gpt_oss"), ("fp16", "mixtral"), ("fp16", "gptj"), ("bf16", "gemma2"), ("bf16", "mixtral")],
)
def test_families(tmp_path: Path, dtype: str, family: str) -> None:
    """Norms that multiply in float32, softcaps, learned sink logits, experts, interleaved pairs: no type meets another one."""
    case, model = CASES[f"all {dtype}"], tiny_model(family)
    model.save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", sinks=2, window=6, chunk=3, dtype=dtype, targets=TARGETS)
    round_weights(model, case.torch_dtype)
    ids = text(40)
    expected = streaming_logits(model, torch.from_numpy(ids), 2, 6).numpy()
    for target in TARGETS:
        with open_bundle(tmp_path / "bundle", target=target, threads=1) as decoder:
            actual = feed_in_cuts(decoder, ids, (1, 3, 2))
        # In bfloat16 a router that chooses another expert, as eager PyTorch's does at other tokens, moves the logits of one token further.
        near = np.abs(actual - expected).max(axis=1) <= case.tolerance * np.abs(expected).max()
        assert np.count_nonzero(~near) <= (1 if dtype == "bf16" else 0), f"{family}, {target}"
        assert_parity(actual[near], expected[near], case.tolerance, f"{family}, {target}")
