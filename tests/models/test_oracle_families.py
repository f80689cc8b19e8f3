"""The oracle for every family: against the untouched model, one form against the other, and against mistakes that must not go unseen.

Between them these leave no room for a common mistake: with a window that holds everything, both policies must be the untouched model, whose
sliding layers' windows have moved on by then; without sinks, the native policy (whole sequence, masks) and the streaming one (token by
token, a cache that evicts) compute the same in entirely different ways. Tolerances as in test_oracle.py, of the largest logit.
"""

from functools import cache

import pytest
import torch
from sinkring.models.anatomy import read_layers
from sinkring.models.oracle import masked_dense_logits, streaming_logits, streaming_logits_stepwise
from sinkring.models.patch import attention_implementation
from sinkring.models.token_call import run_decoder, text_config
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.models.tiny_families import TINY_FAMILIES, VOCAB, find_row, tiny_model

TOKENS = 24
NOISE = 1e-5
LOUD = 0.02
NAMES = [row.name for row in TINY_FAMILIES]
WITH_FULL_LAYERS = [row.name for row in TINY_FAMILIES if row.has_full_layers]
LENGTH_DEPENDENT = "phi3-longrope"


@cache
def model_of(name: str) -> PreTrainedModel:
    return tiny_model(name)


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(5))


def off(left: Tensor, right: Tensor) -> float:
    """Largest difference, as a part of the largest logit."""
    return float((left - right).abs().max() / right.abs().max())


@torch.no_grad()
def untouched(name: str) -> Tensor:
    """Falcon with ALiBi with `sdpa`: see alibi.py. Kyutai and Moshi token by token: their window is in transformers' cache alone."""
    model = model_of(name)
    with attention_implementation(model, "sdpa" if name == "falcon-alibi" else "eager"):
        if name not in ("kyutai_speech_to_text", "moshi-sliding"):
            return run_decoder(model, ids())
        past = DynamicCache(config=text_config(model))
        return torch.cat([run_decoder(model, ids()[step : step + 1], cache=past) for step in range(TOKENS)])


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_read_as_the_table_has_them(name: str) -> None:
    layers = read_layers(model_of(name))
    assert tuple(layer.window for layer in layers) == find_row(name).sliding
    assert tuple(layer.rotation is not None for layer in layers) == find_row(name).rotary


@pytest.mark.parametrize("name", NAMES)
def test_with_a_window_that_holds_everything_it_is_the_untouched_model(name: str) -> None:
    plain = untouched(name)
    assert off(masked_dense_logits(model_of(name), ids(), 2, TOKENS), plain) <= NOISE
    assert off(streaming_logits(model_of(name), ids(), 0, TOKENS), plain) <= NOISE
    assert off(streaming_logits_stepwise(model_of(name), ids(), 2, TOKENS - 2), plain) <= NOISE


@pytest.mark.parametrize("name", NAMES)
def test_without_sinks_both_policies_agree(name: str) -> None:
    native = masked_dense_logits(model_of(name), ids(), 0, 6)
    assert off(streaming_logits(model_of(name), ids(), 0, 6), native) <= NOISE
    if find_row(name).has_full_layers:
        assert off(masked_dense_logits(model_of(name), ids(), 0, 5)[5:], native[5:]) > LOUD


@pytest.mark.parametrize("name", NAMES)
def test_blocks_and_steps_agree_past_eviction(name: str) -> None:
    blocks, steps = streaming_logits(model_of(name), ids(), 2, 5), streaming_logits_stepwise(model_of(name), ids(), 2, 5)
    assert off(blocks, steps) <= 2 * NOISE


@pytest.mark.parametrize("name", WITH_FULL_LAYERS)
def test_sinks_and_windows_off_by_one_are_loud(name: str) -> None:
    for oracle in (masked_dense_logits, streaming_logits):
        right = oracle(model_of(name), ids(), 2, 5)
        for sinks, window in [(2, 4), (1, 5), (1, 6)]:
            wrong = oracle(model_of(name), ids(), sinks, window)
            assert off(wrong[:5], right[:5]) <= NOISE or name == LENGTH_DEPENDENT
            assert off(wrong[7:], right[7:]) > LOUD, (oracle.__name__, sinks, window)


@pytest.mark.parametrize("name", [name for name in WITH_FULL_LAYERS if name != LENGTH_DEPENDENT])
def test_policies_part_where_the_first_token_leaves(name: str) -> None:
    row = find_row(name)
    native, streaming = masked_dense_logits(model_of(name), ids(), 2, 5), streaming_logits(model_of(name), ids(), 2, 5)
    assert off(native[:7], streaming[:7]) <= NOISE
    # A layer that knows no positions sees the same in both; so do sliding layers.
    alibi = not any(row.rotary)
    placed = alibi or any(turns and window is None for turns, window in zip(row.rotary, row.sliding, strict=True))
    if placed:
        assert off(native[7:], streaming[7:]) > LOUD
    else:
        assert off(native, streaming) <= NOISE


@pytest.mark.parametrize("name", [row.name for row in TINY_FAMILIES if not row.has_full_layers])
def test_models_of_sliding_layers_alone_have_one_truth(name: str) -> None:
    first = masked_dense_logits(model_of(name), ids(), 0, 3)
    assert off(streaming_logits(model_of(name), ids(), 4, 9), first) <= NOISE
    assert off(first, untouched(name)) <= NOISE


@pytest.mark.parametrize("name", ["gptj", "glm", "stablelm", "gemma3_text", "gpt_oss", "moshi"])
def test_age_does_not_matter_to_exact_angles_of_any_layout(name: str) -> None:
    young = masked_dense_logits(model_of(name), ids(), 2, 5)
    assert off(masked_dense_logits(model_of(name), ids(), 2, 5, start_position=2**24 + 1), young) <= NOISE


def test_the_two_bases_are_told_apart() -> None:
    layers = read_layers(model_of("gemma3_text"))
    assert [layer.rotation and layer.rotation.angles.layer_type for layer in layers] == ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("name", "field", "other"),
    [
        (
            "gemma3_text",
            "rope_parameters",
            {kind: {"rope_type": "default", "rope_theta": 1e2} for kind in ("full_attention", "sliding_attention")},
        ),
        ("smollm3", "no_rope_layer_interval", 4),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "sliding_window", 7),
        ("stablelm", "partial_rotary_factor", 0.5),
        ("bloom", "n_head", 8),
        ("ministral", "layer_types", ["full_attention"] * 4),
    ],
)
def test_what_a_configuration_says_is_loud(name: str, field: str, other: object) -> None:
    right = streaming_logits(model_of(name), ids(), 2, 5)
    wrong = streaming_logits(tiny_model(name, **{field: other}), ids(), 2, 5)
    assert off(wrong[8:], right[8:]) > LOUD


def test_learned_sink_logits_are_loud_and_are_no_sinks_of_a_stream() -> None:
    right = streaming_logits(model_of("gpt_oss"), ids(), 2, 5)
    model = tiny_model("gpt_oss")
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    assert off(streaming_logits(model, ids(), 2, 5), right) > LOUD
    assert off(streaming_logits(model, ids(), 2, 5), streaming_logits_stepwise(model, ids(), 2, 5)) <= 2 * NOISE
