"""Families sinkring can export: a lookup from a configuration's `model_type` to what is special about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sinkring.models.errors import UnsupportedModel

# Fields that other architectures give a meaning to and transformers' Llama passes over: a checkpoint that has one was made by code that
# heeds it. Each with whether a value changes nothing; None and an absent field never do.
_NEUTRAL: dict[str, Callable[[Any, "DecoderShape"], bool]] = {
    "sliding_window": lambda value, _: not value,
    "attn_logit_softcapping": lambda value, _: not value,
    "final_logit_softcapping": lambda value, _: not value,
    "is_causal": lambda value, _: value is True,
    "use_bidirectional_attention": lambda value, _: value is False,
    "layer_types": lambda value, _: all(kind == "full_attention" for kind in value),
    "attention_chunk_size": lambda value, _: not value,
    "no_rope_layers": lambda value, _: all(turned == 1 for turned in value),
    "use_qk_norm": lambda value, _: value is False,
    "embedding_multiplier": lambda value, _: value == 1,
    "residual_multiplier": lambda value, _: value == 1,
    "logits_scaling": lambda value, _: value == 1,
    "attention_multiplier": lambda value, shape: abs(value * shape.head_size**0.5 - 1) < 1e-6,
    "query_pre_attn_scalar": lambda value, shape: value == shape.head_size,
}


@dataclass(frozen=True)
class Family:
    """How one architecture is read.

    rotary, layers: attribute paths, from the causal LM, of the module that makes cos and sin and of the list of decoder layers.
    rope_types: kinds of rotary scaling that its rotary module honours; see `rope.py` for those that depend on the length.
    """

    name: str
    examples: str
    rope_types: tuple[str, ...]
    rotary: str
    layers: str


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder, in the README's alphabet: layers, hidden size, H, G, D, V, and the context it was trained for (tokens)."""

    layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    context_tokens: int


def families() -> dict[str, Family]:
    from sinkring.models.llama import LLAMA

    return {family.name: family for family in (LLAMA,)}


def find_family(config: Any) -> Family:
    """The family of a Hugging Face configuration. Raises UnsupportedModel, naming the supported ones, or what in it is not honoured."""
    known = families()
    family = known.get(config.model_type)
    if family is None:
        supported = ", ".join(f"{name} ({entry.examples})" for name, entry in sorted(known.items()))
        raise UnsupportedModel(f"architecture {config.model_type!r} is not supported; supported: {supported}")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in family.rope_types:
        raise UnsupportedModel(
            f"{family.name}: rope_type {rope_type!r} is not supported, only {', '.join(family.rope_types)}; use another model"
        )
    shape = decoder_shape(config)
    for field, neutral in _NEUTRAL.items():
        value = getattr(config, field, None)
        if value is not None and not _changes_nothing(neutral, value, shape):
            raise UnsupportedModel(
                f"{family.name}: {field}={value!r} is not honoured by transformers' {config.model_type} nor here; remove it if "
                "the model was trained without it, or use another model"
            )
    # transformers keeps it among the rope parameters, and its Llama then either fails or turns whole heads all the same.
    for partial in (getattr(config, "partial_rotary_factor", None), rope.get("partial_rotary_factor")):
        if partial not in (None, 1.0):
            raise UnsupportedModel(
                f"{family.name}: partial_rotary_factor={partial} is not honoured by transformers' {config.model_type}, which turns whole "
                "heads; use another model"
            )
    return family


def _changes_nothing(neutral: Callable[[Any, DecoderShape], bool], value: Any, shape: DecoderShape) -> bool:
    try:
        return neutral(value, shape)
    except TypeError:  # a config.json may hold anything, and what is not understood is not neutral
        return False


def decoder_shape(config: Any) -> DecoderShape:
    """Sizes as the Hugging Face configuration states them."""
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
    )
