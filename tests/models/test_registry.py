"""Settings that other architectures heed and Llama's code passes over: refused by name, unless they change nothing."""

from typing import Any

import pytest
from sinkring.models import registry
from sinkring.models.errors import UnsupportedModel
from sinkring.models.registry import find_family
from transformers import BloomConfig, LlamaConfig

HEAD_SIZE = 16
MEANS_SOMETHING: list[tuple[str, Any]] = [
    ("is_causal", False),
    ("use_bidirectional_attention", True),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["chunked_attention", "full_attention"]),
    ("layer_types", 3),
    ("sliding_window", 8),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("attention_chunk_size", 8192),
    ("no_rope_layers", [1, 0]),
    ("use_qk_norm", True),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.22),
    ("logits_scaling", 8.0),
    ("attention_multiplier", 0.0156),
    ("query_pre_attn_scalar", 256),
    ("query_pre_attn_scalar", "256"),
]
CHANGES_NOTHING: list[tuple[str, Any]] = [
    ("is_causal", True),
    ("use_bidirectional_attention", False),
    ("layer_types", ["full_attention", "full_attention"]),
    ("sliding_window", 0),
    ("attention_chunk_size", None),
    ("no_rope_layers", [1, 1]),
    ("use_qk_norm", False),
    ("embedding_multiplier", 1),
    ("residual_multiplier", 1.0),
    ("logits_scaling", 1.0),
    ("attention_multiplier", HEAD_SIZE**-0.5),
    ("query_pre_attn_scalar", HEAD_SIZE),
]


def config(field: str, value: Any) -> LlamaConfig:
    made = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    setattr(made, field, value)
    return made


@pytest.mark.parametrize(("field", "value"), MEANS_SOMETHING)
def test_a_setting_that_would_be_passed_over_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as error:
        find_family(config(field, value))
    assert str(error.value).startswith(f"llama: {field}={value!r} is not honoured by transformers' llama nor here")


@pytest.mark.parametrize(("field", "value"), CHANGES_NOTHING)
def test_one_that_changes_nothing_is_taken(field: str, value: Any) -> None:
    assert find_family(config(field, value)).name == "llama"


@pytest.mark.parametrize(("here", "refused"), [("5.20.2", True), ("5.23.0", True), ("5.24.0", False), ("5.100.0", False)])
def test_a_family_of_a_newer_transformers_is_refused_with_both_versions(here: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "version", lambda _: here)
    if not refused:
        assert find_family(BloomConfig()).name == "bloom"
        return
    with pytest.raises(UnsupportedModel, match=rf"'bloom' needs transformers >= 5\.24, here is {here}"):
        find_family(BloomConfig())
