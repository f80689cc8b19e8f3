"""Honour or refuse: every field of a published configuration is taken, and what transformers would pass over is refused by name."""

import dataclasses
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sinkring.models import settings
from sinkring.models.errors import UnsupportedModel
from sinkring.models.registry import families, find_family, supported_here
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from tests.models.published_configs import PUBLISHED


def read(folder: Path, name: str, **changes: Any) -> Any:
    """The configuration as it is read from a folder."""
    family = families()[PUBLISHED[name]["model_type"]]
    if not supported_here(family):
        pytest.skip(f"{family.name} needs transformers >= {family.since}")
    (folder / "config.json").write_text(json.dumps({**PUBLISHED[name], **changes}))
    return AutoConfig.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_honest_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    assert find_family(read(tmp_path, name)).name == PUBLISHED[name]["model_type"]


# Whatever the family, each of these would be passed over, or would replace what is ours.
_ANY = {
    "attention_of_its_own": "fancy",
    "attn_output_gate": True,
    "attention_chunk_size": 8192,
    "use_bidirectional_attention": True,
    "prefix_lm": True,
    "is_encoder_decoder": True,
    "qk_clip": 3.0,
}


@pytest.mark.parametrize("field", _ANY)
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "gemma-2-2b", "falcon-7b", "bloom-560m", "gpt-oss-20b", "phi-2"])
def test_a_field_with_a_meaning_that_nothing_heeds_is_refused_by_name(name: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^{PUBLISHED[name]['model_type']}: {field}={_ANY[field]!r} "):
        find_family(read(tmp_path, name, **{field: _ANY[field]}))


OF_OTHERS = [
    ("SmolLM2-135M-Instruct", "rope_interleaved", True),
    ("SmolLM2-135M-Instruct", "sliding_window", 4096),
    ("SmolLM2-135M-Instruct", "attn_logit_softcapping", 50.0),
    ("SmolLM2-135M-Instruct", "final_logit_softcapping", 30.0),
    ("SmolLM2-135M-Instruct", "embedding_multiplier", 12.0),
    ("SmolLM2-135M-Instruct", "logits_scaling", 8.0),
    ("SmolLM2-135M-Instruct", "query_pre_attn_scalar", 256),
    ("SmolLM2-135M-Instruct", "num_local_experts", 8),
    ("SmolLM2-135M-Instruct", "no_rope_layers", [1, 0] * 15),
    ("SmolLM2-135M-Instruct", "layer_types", ["sliding_attention"] * 30),
    ("Qwen2.5-0.5B", "use_mrope", True),
    ("Qwen2.5-0.5B", "use_qk_norm", True),
    ("Mistral-7B-v0.1", "attention_bias", True),
    ("gemma-2b", "final_logit_softcapping", 30.0),
    ("gemma-2-2b", "layer_types", ["sliding_attention", "linear_attention"] * 13),
    ("gpt-j-6b", "rotary", False),
    ("gpt-j-6b", "scale_attn_weights", False),
    ("starcoder2-3b", "scale_attn_weights", False),
    ("starcoder2-3b", "mlp_type", "gated"),
    ("starcoder2-3b", "norm_type", "rms_norm"),
    ("c4ai-command-r7b-12-2024", "use_gated_activation", False),
    ("c4ai-command-r7b-12-2024", "use_parallel_block", False),
    ("c4ai-command-r7b-12-2024", "position_embedding_type", "alibi"),
    ("c4ai-command-r7b-12-2024", "rotary_pct", 0.5),
]


@pytest.mark.parametrize(("name", "field", "value"), OF_OTHERS, ids=lambda value: str(value)[:30])
def test_a_field_that_other_code_heeds_is_refused_by_name(name: str, field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^{PUBLISHED[name]['model_type']}: {field}="):
        find_family(read(tmp_path, name, **{field: value}))


DECLARED_IN_VAIN = [
    ("mpt-7b", "logit_scale", 0.5),
    ("mpt-7b", "no_bias", False),
    ("mpt-7b", "norm_type", "rmsnorm"),
    ("gpt-oss-20b", "hidden_act", "relu"),
]


@pytest.mark.parametrize(("name", "field", "value"), DECLARED_IN_VAIN)
def test_a_field_that_is_declared_and_never_read_is_refused_by_name(name: str, field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^{PUBLISHED[name]['model_type']}: {field}="):
        find_family(read(tmp_path, name, **{field: value}))


# Fields of transformers' classes that none of their code reads by name, and why that is well.
_UNREAD = {
    "tie_word_embeddings": "read where weights are tied",
    "use_sliding_window": "read where the configuration is made",
    "max_window_layers": "read where the configuration is made",
    "no_rope_layer_interval": "read where the configuration is made",
    "expansion_ratio": "a size: a wrong one fits no weight",
    "emb_pdrop": "of training",
    "init_device": "of training",
    "learned_pos_emb": "MPT has none with ALiBi, without which it is refused",
}


@pytest.mark.parametrize("name", families())
def test_every_declared_field_is_read_or_known(name: str) -> None:
    config = CONFIG_MAPPING[name]
    code = inspect.getsource(import_module(config.__module__.replace("configuration", "modeling")))
    own = {field.name for field in dataclasses.fields(config)} - {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = {field: [field, *(alias for alias, other in (config.attribute_map or {}).items() if other == field)] for field in own}
    unread = {field for field, called in names.items() if not any(re.search(rf"\b(config|self)\.{each}\b", code) for each in called)}
    known = {*_UNREAD, *settings._OURS, *settings._WITHOUT_EFFECT, *settings._DECLARED_IN_VAIN.get(name, ())}
    assert unread <= known, f"transformers' {name} declares {sorted(unread - known)} and reads it nowhere"


def test_rope_that_a_family_would_not_turn_by(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor=0\.5"):
        find_family(read(tmp_path, "SmolLM2-135M-Instruct", partial_rotary_factor=0.5))
