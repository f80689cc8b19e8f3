"""Which angles a stream has, where a model's depend on the length of the sequence, and when it has none."""

from typing import Any

import pytest
import torch
from sinkring.models.errors import UnsupportedModel
from sinkring.models.registry import find_family
from sinkring.models.rope import original_context, rope_frequencies, rope_length
from sinkring.models.rotation import rotary_at_length
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

TRAINED, ORIGINAL = 64, 16
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": ORIGINAL,
}
CONSTANT: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
]


def config(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=TRAINED, rope_parameters={"rope_theta": 1e4, **rope})


@pytest.mark.parametrize("rope", [*CONSTANT, DYNAMIC, LONGROPE], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, TRAINED])
def test_frequencies_are_those_that_a_forward_pass_of_that_length_uses(rope: dict[str, Any], length: int) -> None:
    rotary = LlamaRotaryEmbedding(config(rope))
    # What the pass before left in the module must not matter.
    rotary(torch.zeros(1), torch.tensor([[3 * TRAINED]]))
    inv_freq, scaling = rope_frequencies(rotary, length)
    cos, sin = LlamaRotaryEmbedding(config(rope))(torch.zeros(1), torch.arange(length)[None])
    angles = torch.arange(length)[:, None] * inv_freq
    torch.testing.assert_close(cos[0], (angles.cos() * scaling).repeat(1, 2))
    torch.testing.assert_close(sin[0], (angles.sin() * scaling).repeat(1, 2))
    assert torch.equal(rotary_at_length(rotary, length).inv_freq, inv_freq), "the oracle's own way to them"


def test_longrope_changes_after_the_original_context_and_dynamic_after_the_trained() -> None:
    longrope, dynamic = LlamaRotaryEmbedding(config(LONGROPE)), LlamaRotaryEmbedding(config(DYNAMIC))
    assert (original_context(longrope.config), original_context(dynamic.config)) == (ORIGINAL, TRAINED)
    for rotary, last in ((longrope, ORIGINAL), (dynamic, TRAINED)):
        first = rope_frequencies(rotary, 1)[0]
        assert torch.equal(rope_frequencies(rotary, last)[0], first)
        assert not torch.equal(rope_frequencies(rotary, last + 1)[0], first)


@pytest.mark.parametrize(
    ("rope", "policy", "sinks", "window"),
    [
        *((rope, policy, 4, 60) for rope in CONSTANT for policy in ("native", "streaming")),
        (DYNAMIC, "streaming", 4, TRAINED - 4),
        (DYNAMIC, "native", 0, TRAINED),
        (LONGROPE, "streaming", 4, ORIGINAL - 4),
        (LONGROPE, "streaming", 4, ORIGINAL - 3),
        (LONGROPE, "streaming", 0, TRAINED),
        (LONGROPE, "native", 0, ORIGINAL),
    ],
)
def test_a_stream_has_the_angles_of_sinks_and_window(rope: dict[str, Any], policy: str, sinks: int, window: int) -> None:
    assert rope_length(config(rope), policy, sinks, window) == sinks + window


@pytest.mark.parametrize(
    ("rope", "policy", "sinks", "window", "match"),
    [
        (DYNAMIC, "native", 1, 4, "'dynamic' with policy native and sinks=1"),
        (DYNAMIC, "streaming", 4, TRAINED, f"beyond {TRAINED} tokens its angles change with every token; use at most {TRAINED}"),
        (LONGROPE, "native", 1, 4, "'longrope' with policy native and sinks=1"),
        (LONGROPE, "native", 0, ORIGINAL + 1, f"after {ORIGINAL} tokens the model itself changes from its short factors"),
    ],
)
def test_streams_without_one_set_of_angles_are_refused(rope: dict[str, Any], policy: str, sinks: int, window: int, match: str) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        rope_length(config(rope), policy, sinks, window)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, DYNAMIC])
def test_partial_rotation_is_refused_wherever_it_stands(rope: dict[str, Any]) -> None:
    whole = config({**rope, "partial_rotary_factor": 1.0})
    assert find_family(whole).name == "llama"
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor=0\.5 is not honoured"):
        find_family(config({**rope, "partial_rotary_factor": 0.5}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
        {"rope_theta": float("nan")},
        {"rope_theta": float("inf")},
        {"rope_type": "linear", "factor": 0.0},
        {"rope_type": "linear", "factor": -2.0},
        {**LONGROPE, "short_factor": [1.0, 1.1, -1.2, 1.3]},
        {**LONGROPE, "attention_factor": float("nan")},
    ],
    ids=str,
)
def test_angles_that_are_not_finite_and_positive_are_refused_with_the_parameters(wrong: dict[str, Any]) -> None:
    rotary = LlamaRotaryEmbedding(config({"rope_type": "default", **wrong}))
    with pytest.raises(UnsupportedModel, match=r"rope_theta=.*that are not finite and above 0"):
        rope_frequencies(rotary, ORIGINAL)


def test_an_unknown_kind_is_refused_with_the_known() -> None:
    with pytest.raises(
        UnsupportedModel, match="rope_type 'proportional' is not supported, only default, linear, llama3, yarn, dynamic, longrope"
    ):
        find_family(config({"rope_type": "proportional", "factor": 2.0}))
