"""Each kind of rope that the family knows, under each policy that it is defined for, young and at any age."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sinkring.exporter.export import export_decoder
from sinkring.exporter.validate import validate_bundle
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.runtime.decoder import open_bundle

from tests.models.tiny import tiny_llama
from tests.parity.ageing import continue_at_age, shift_towards
from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import LONGROPE, MODELS, ROPE_EXPORTS, TARGETS, TinyBundle, feed_in_cuts, text

Bundles = Callable[[str], TinyBundle]

# The same weights under another rope: what a bundle would be that had read its own wrongly.
_SHORT_ALWAYS = {**LONGROPE, "long_factor": LONGROPE["short_factor"]}
_LONG_ALWAYS = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_YARN = MODELS["yarn, one layer"]["rope_parameters"]
WRONG: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "linear streaming": [("positions as they are", {"rope_parameters": _DEFAULT})],
    "linear native": [("positions as they are", {"rope_parameters": _DEFAULT})],
    "llama3 streaming": [("no scaling", {"rope_parameters": _DEFAULT})],
    "yarn native": [
        ("no scaling", {"rope_parameters": _DEFAULT}),
        ("cos and sin not scaled", {"rope_parameters": {**_YARN, "attention_factor": 1.0}}),
    ],
    "dynamic streaming": [("a base that has grown", {"max_position_embeddings": 11})],
    "dynamic native": [("a base that has grown", {"max_position_embeddings": 11})],
    "longrope short streaming": [("the long factors", {"rope_parameters": _LONG_ALWAYS})],
    "longrope short native": [("the long factors", {"rope_parameters": _LONG_ALWAYS})],
    "longrope long streaming": [
        ("the short factors", {"rope_parameters": _SHORT_ALWAYS}),
        ("cos and sin not scaled", {"rope_parameters": {**LONGROPE, "attention_factor": 1.0}}),
    ],
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROPE_EXPORTS)
def test_logits_are_those_of_the_oracle(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    ids = text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(target), ids, (1, 3, 2, 9))
    assert_parity(actual, bundle.oracle(ids), what=f"{name}, {target}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROPE_EXPORTS)
@pytest.mark.parametrize("age", [(1 << 24) + 1, 1 << 40], ids=["2^24+1", "2^40"])
def test_age_does_not_matter(parity_bundle: Bundles, name: str, target: str, age: int) -> None:
    bundle = parity_bundle(name)
    young = bundle.geometry.capacity + 3
    ids = text(young + bundle.geometry.slots + 2, seed=3)
    tokens = shift_towards(bundle.geometry, young, age)
    old = continue_at_age(bundle, bundle.decoder(target), ids, young, tokens)
    assert_parity(old, bundle.oracle(ids)[young:], what=f"{name}, {target}, at position {young + tokens}")


@pytest.mark.parametrize("name", ROPE_EXPORTS)
def test_controls_are_seen(parity_bundle: Bundles, name: str) -> None:
    bundle = parity_bundle(name)
    export = bundle.export
    ids = text(bundle.wrapped_thrice)
    actual = feed_in_cuts(bundle.decoder(), ids, (3,))
    logits = streaming_logits if export.policy == "streaming" else masked_dense_logits
    for what, change in WRONG[name]:
        other = tiny_llama(**{**MODELS[export.model], **change})
        assert_loudly_wrong(actual, logits(other, torch.from_numpy(ids), export.sinks, export.window).numpy(), f"{name}: {what}")


@pytest.mark.parametrize("name", ["longrope long streaming", "dynamic native"])
def test_validation_has_the_same_angles(parity_bundle: Bundles, name: str) -> None:
    result = validate_bundle(parity_bundle(name).path, 40, target="onnxruntime")
    assert result.passed, result.failures
    assert result.controls


@pytest.mark.parametrize("name", ["yarn, one layer", "longrope"])
def test_kinds_that_scale_cos_and_sin_do(name: str) -> None:
    assert model_of(name).model.rotary_emb.attention_scaling > 1.1


@cache
def model_of(name: str) -> Any:
    return tiny_llama(**MODELS[name])


@pytest.mark.parametrize(("name", "sinks", "window"), [("longrope", 2, 20), ("longrope", 2, 14), ("dynamic", 2, 20)])
def test_a_full_cache_is_the_untouched_model_over_as_many_tokens(name: str, sinks: int, window: int) -> None:
    """What a stream's angles mean: transformers' own for a sequence of S + W tokens, which here is just what has been fed."""
    ids = torch.from_numpy(text(sinks + window, seed=4))
    plain = model_of(name)(ids[None]).logits[0]
    assert_parity(streaming_logits(model_of(name), ids, sinks, window).numpy(), plain.numpy())


def test_a_capacity_within_the_original_context_is_the_untouched_model(tmp_path: Path) -> None:
    model_of("longrope").save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", policy="native", capacity=16, chunk=5, targets=["onnxruntime"])
    ids = text(16, seed=5)
    with open_bundle(tmp_path / "bundle", threads=1) as decoder:
        actual = feed_in_cuts(decoder, ids, (1, 5, 2))
    assert_parity(actual, model_of("longrope")(torch.from_numpy(ids)[None]).logits[0].numpy())
