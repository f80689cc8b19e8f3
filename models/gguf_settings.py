"""What a GGUF file says about its model must reach the configuration that transformers makes of it, or the file is refused.

transformers reads some keys of each architecture and passes over all others without a word, and so it does with tensors that its classes
have no place for. Here each key is compared with the configuration that was made, whoever set it, and each tensor with the model's.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sinkring.models.errors import UnsupportedModel
from sinkring.models.settings import rope_parameter_sets

# What the file says, the configuration -> whether the configuration says the same.
_Agrees = Callable[[Any, Any], bool]


def _same(*names: str) -> _Agrees:
    """The first of these fields that the configuration has holds the value."""

    def agrees(value: Any, config: Any) -> bool:
        found = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
        return bool(found) and _equal(found[0], value)

    return agrees


def _equal(found: Any, value: Any) -> bool:
    if isinstance(value, float) and isinstance(found, int | float):
        return abs(found - value) <= 1e-6 * abs(value)  # float32 in the file
    return bool(found == value)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rotated(value: Any, config: Any) -> bool:
    sets = rope_parameter_sets(config).values()
    factors = [rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0 for rope in sets]
    return all(int(_head_size(config) * factor) == value for factor in factors)


def _base(value: Any, config: Any) -> bool:
    sets = rope_parameter_sets(config)
    rope = sets.get("full_attention") or sets.get(None) or {}
    return _equal(rope.get("rope_theta"), value)


def _window(value: Any, config: Any) -> bool:
    window = getattr(config, "sliding_window", None)
    return value == (window or 0) or (not window and value >= config.max_position_embeddings)


def _pattern(value: Any, config: Any) -> bool:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return list(value) == sliding if isinstance(value, list) else sliding == [bool((layer + 1) % value) for layer in range(len(sliding))]


# Keys of an architecture, without its name.
_KEYS: dict[str, _Agrees] = {
    "context_length": lambda value, config: True,  # BLOOM's class has no field for it, and it has no other effect than how far one asks
    "block_count": _same("num_hidden_layers"),
    "embedding_length": _same("hidden_size"),
    "feed_forward_length": lambda value, config: value == (_feed_forward(config) or value),
    "vocab_size": _same("vocab_size"),
    "attention.head_count": _same("num_attention_heads"),
    "attention.head_count_kv": lambda value, config: value == _kv_heads(config),
    "attention.key_length": lambda value, config: value == _head_size(config),
    "attention.value_length": lambda value, config: value == _head_size(config),
    "attention.layer_norm_rms_epsilon": _same("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.layer_norm_epsilon": _same("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.causal": lambda value, _: value is True,
    "attention.clamp_kqv": lambda value, _: not value,
    "attention.max_alibi_bias": lambda value, _: not value,
    "attention.scale": lambda value, config: not value or _equal(_head_size(config) ** -0.5, value),
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": _pattern,
    "attn_logit_softcapping": lambda value, config: _equal(getattr(config, "attn_logit_softcapping", None) or 0.0, value),
    "final_logit_softcapping": lambda value, config: _equal(getattr(config, "final_logit_softcapping", None) or 0.0, value),
    "rope.dimension_count": _rotated,
    "rope.freq_base": _base,
    "rope.freq_base_swa": lambda value, config: _equal(rope_parameter_sets(config).get("sliding_attention", {}).get("rope_theta"), value),
    "rope.scaling.type": lambda value, _: value == "none",
    "rope.scaling.factor": lambda value, _: value in (0.0, 1.0),
    "rope.scale_linear": lambda value, _: value in (0.0, 1.0),
    "rope.scaling.original_context_length": lambda value, config: True,  # of a scaling, whose type or tensors say so
    "rope.scaling.finetuned": lambda value, config: True,
    "expert_count": lambda value, config: value == _experts(config),
    "expert_used_count": lambda value, config: value == (getattr(config, "num_experts_per_tok", 0) if _experts(config) else 0),
    "expert_feed_forward_length": _same("moe_intermediate_size"),
    "logit_scale": lambda value, _: value in (0.0, 1.0),
    "embedding_scale": lambda value, _: value in (0.0, 1.0),
    "residual_scale": lambda value, _: value in (0.0, 1.0),
    "use_parallel_residual": _same("use_parallel_residual"),
    "tensor_data_layout": lambda value, _: True,  # how the rows of q and k lie, which transformers knows by the architecture
}
# Without which a model is only what transformers takes for granted of its family, and whether that is right.
_MUST_SAY: dict[str, Callable[[Any], str | None]] = {
    "gemma2": lambda config: (
        None
        if config.num_hidden_layers != 46
        else "its attention scale, that of the 27B model, is not in the file, and transformers takes that of the smaller ones"
    ),
    "gemma3": lambda config: (
        None
        if config.num_hidden_layers != 62
        else "its attention scale, that of the 27B model, is not in the file, and transformers takes that of the smaller ones"
    ),
    "gpt-oss": lambda config: "transformers reads neither its window nor its experts",
    "mistral": lambda config: "transformers gives it a sliding window that is not in the file",
}
_INSTEAD = "give the model's safetensors folder"


def check_gguf_settings(where: object, architecture: str, fields: Mapping[str, Any], config: Any) -> None:
    """Raises UnsupportedModel for the first key that `config`, made by transformers of the file, does not agree with or that is unknown.

    fields: every key of the file with its value. where: the file, for errors.
    """
    if (kind := fields.get("general.type", "model")) != "model":
        raise UnsupportedModel(f"{where}: is not a whole model but of type {kind!r}; give the model that it belongs to")
    if lost := _MUST_SAY.get(architecture, lambda _: None)(config):
        raise UnsupportedModel(f"{where}: {architecture}: {lost}; {_INSTEAD}")
    for name, value in fields.items():
        key = name.removeprefix(f"{architecture}.")
        if key == name:
            continue
        agrees = _KEYS.get(key)
        if agrees is None or not _agree(agrees, value, config):
            raise UnsupportedModel(
                f"{where}: {name} = {_short(value)} is lost when transformers reads a GGUF of {architecture}, or is unknown; {_INSTEAD}"
            )


def check_gguf_tensors(where: object, tensors: Iterable[str], known: Iterable[str]) -> None:
    """Raises UnsupportedModel for the first tensor of the file that is none of those `known`, which transformers then passes over."""
    known = set(known)
    if lost := [name for name in tensors if name not in known]:
        raise UnsupportedModel(
            f"{where}: {len(lost)} of its tensors, the first is {lost[0]}, are lost when transformers reads a GGUF; {_INSTEAD}"
        )


def _agree(agrees: _Agrees, value: Any, config: Any) -> bool:
    try:
        return agrees(value, config)
    except (TypeError, AttributeError):  # a value of another kind, or a field that this configuration lacks
        return False


def _kv_heads(config: Any) -> Any:
    if config.model_type == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _feed_forward(config: Any) -> Any:
    return getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None)


def _experts(config: Any) -> int:
    return int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
