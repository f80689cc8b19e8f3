"""What a configuration says must be honoured or refused.

A field that the configuration's class declares is honoured by transformers' own code, which is what the front end traces, but for a few
that would change the mask or the cache, which are ours. A field that the class does not declare is passed over by transformers: a
checkpoint that has one was made by code that heeds it, so its export stops, unless the value is known to change nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from sinkring.models.errors import UnsupportedModel

# Whether a value changes nothing. They replace transformers' mask or cache, declared or not.
_OURS: dict[str, Callable[[Any, Any], bool]] = {
    "is_causal": lambda value, _: value is True,
    "use_bidirectional_attention": lambda value, _: not value,
    "attention_chunk_size": lambda value, _: not value,
    "add_cross_attention": lambda value, _: value is False,
    "is_encoder_decoder": lambda value, _: value is False,
    "prefix_lm": lambda value, _: value is False,
    "layer_types": lambda value, _: all(kind in ("full_attention", "sliding_attention") for kind in value),
}
# Declared by the class of an architecture, and read by none of its code.
_DECLARED_IN_VAIN: dict[str, dict[str, Callable[[Any, Any], bool]]] = {
    "mpt": {
        "logit_scale": lambda value, _: not value,
        "no_bias": lambda value, _: value is True,
        "embedding_fraction": lambda value, _: value == 1,
        "norm_type": lambda value, _: value in ("layernorm", "low_precision_layernorm"),
    },
    "gpt_oss": {"hidden_act": lambda value, _: value == "silu"},
}
# Set by the class itself on what is no field of it, and read by no part of the model that is here.
_SET_BY_CLASS = {
    "kyutai_speech_to_text": ("frame_size",),
    "voxtral_realtime": ("hidden_size",),
    "voxtral_realtime_text": ("tie_word_embeddings",),  # which the whole model's configuration decides
}
# Of fields that other architectures give a meaning to, where the class does not declare them.
_UNDECLARED: dict[str, Callable[[Any, Any], bool]] = {
    "sliding_window": lambda value, _: not value,
    "use_sliding_window": lambda value, _: value is False,
    "max_window_layers": lambda value, _: True,  # counts layers of a window that use_sliding_window or sliding_window turns on
    "attn_logit_softcapping": lambda value, _: not value,
    "final_logit_softcapping": lambda value, _: not value,
    "layer_types": lambda value, _: all(kind == "full_attention" for kind in value),
    "no_rope_layers": lambda value, _: all(turned == 1 for turned in value),
    "use_qk_norm": lambda value, _: value is False,
    "embedding_multiplier": lambda value, _: value == 1,
    "residual_multiplier": lambda value, _: value == 1,
    "logits_scaling": lambda value, _: value == 1,
    "logit_scale": lambda value, _: value == 1,
    "attention_multiplier": lambda value, config: abs(value * _head_size(config) ** 0.5 - 1) < 1e-6,
    "query_pre_attn_scalar": lambda value, config: value == _head_size(config),
    "partial_rotary_factor": lambda value, _: value == 1,
    "rotary_pct": lambda value, _: value == 1,
    "alibi": lambda value, _: value is False,
    "attention_bias": lambda value, _: value is False,
    "mlp_bias": lambda value, _: value is False,
    "bias": lambda value, _: value is False,
    "qkv_bias": lambda value, _: value is False,
    "attn_output_gate": lambda value, _: value is False,
    "rope_interleaved": lambda value, _: value is False,
    "tie_encoder_decoder": lambda value, _: value is False,
    "num_experts": lambda value, _: value <= 1,
    "num_local_experts": lambda value, _: value <= 1,
    "experts_per_token": lambda value, config: value == config.num_experts_per_tok,
    "use_mrope": lambda value, _: value is False,
    "rotary": lambda value, _: value is True,
    "position_embedding_type": lambda value, config: value == "rope" or (value == "rope_gptj" and _is_cohere(config)),
    "initial_context_length": lambda value, config: value == rope_parameter_sets(config)[None].get("original_max_position_embeddings"),
    "layer_switch": lambda value, config: _has_pattern(value, config),
    "sliding_window_pattern": lambda value, config: _has_pattern(value, config),
    "order_of_interleaved_layers": lambda value, config: value == "local_attn_first" and config.layer_types[0] == "sliding_attention",
    "scale_attn_weights": lambda value, _: value is True,
    "scale_attn_by_inverse_layer_idx": lambda value, _: value is False,
    "apply_residual_connection_post_layernorm": lambda value, _: value is False,
    "skip_bias_add_qkv": lambda value, _: value is False,
    "use_parallel_block": lambda value, config: value is _is_cohere(config),
    "use_gated_activation": lambda value, config: value is _is_cohere(config),
    "use_embedding_sharing": lambda value, config: value is config.tie_word_embeddings,
    "hidden_act": lambda value, config: value == config.hidden_activation,
    # Published beside the one that counts: "gelu" for its own approximation.
    "activation_function": lambda value, config: value == config.hidden_act or (value, config.hidden_act) == ("gelu", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": lambda value, config: value == getattr(config, "norm_epsilon", None),
    "mlp_type": lambda value, _: value == "default",
    "norm_type": lambda value, config: value == ("rms_norm" if hasattr(config, "rms_norm_eps") else "layer_norm"),
}
# Undeclared fields that say nothing about what the model computes. Where a name is None or starts with _ it is transformers' own.
_WITHOUT_EFFECT = frozenset(
    """
    architectures auto_map model_type torch_dtype dtype transformers_version name_or_path transformers.js_config use_cache
    quantization_config unsloth_version unsloth_fixed is_llama_config is_decoder attn_implementation experts_implementation
    initializer_range initializer_factor attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop dropout classifier_dropout
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj pad_token_id bos_token_id
    eos_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id pad_token
    bos_token eos_token tokenizer_class chat_template prefix problem_type finetuning_task id2label label2id num_labels
    output_attentions output_hidden_states output_router_logits output_scores return_dict return_dict_in_generate router_aux_loss_coef
    router_z_loss_coef router_jitter_noise rope_theta rope_scaling rope_local_base_freq pretraining_tp use_return_dict torchscript
    do_sample temperature top_k top_p typical_p min_length max_length num_beams num_beam_groups num_return_sequences diversity_penalty
    length_penalty repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids early_stopping
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens chunk_size_feed_forward pruned_heads
    tf_legacy_loss use_bfloat16 task_specific_params gradient_checkpointing max_sequence_length model_max_length seq_length language
    ignore_keys_at_rope_validation cache_implementation offset_alibi skip_bias_add attention_softmax_in_fp32 masked_softmax_fusion
    bias_dropout_fusion scale_attention_softmax_in_fp32 reorder_and_upcast_attn use_parallel_embedding init_config tokenizer_name verbose
    base_model_tp_plan base_model_pp_plan base_model_ep_plan
    head_dim num_key_value_heads
    """.split()  # noqa: SIM905 - a paragraph of words, not a page of quotes. The last two are sizes: a wrong one fits no weight.
)


def check_settings(config: Any, rope_types: tuple[str, ...], partial: bool) -> None:
    """Raises UnsupportedModel for the first setting that neither transformers' code nor this project would honour.

    rope_types: the kinds of rotary scaling that the family's rotary module honours; none for a model without rotary positions.
    partial: whether it honours partial_rotary_factor.
    """
    _check_rope(config, rope_types, partial)
    known = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    aliases = getattr(config, "attribute_map", None) or {}
    known |= {*aliases, *aliases.values()}
    for field, value in vars(config).items():
        if value is None or field.startswith("_"):
            continue
        declared = {**_OURS, **_DECLARED_IN_VAIN.get(config.model_type, {})}
        table = declared if field in known else {**_OURS, **_UNDECLARED}
        neutral = table.get(field)
        if neutral is not None:
            if not _changes_nothing(neutral, value, config):
                raise UnsupportedModel(
                    f"{config.model_type}: {field}={value!r} is not honoured by transformers' {config.model_type} nor here; remove it if "
                    "the model was trained without it, or use another model"
                )
        elif field not in known and field not in _WITHOUT_EFFECT and field not in _SET_BY_CLASS.get(config.model_type, ()):
            raise UnsupportedModel(
                f"{config.model_type}: {field}={value!r} in its configuration is unknown to transformers' {type(config).__name__}, which "
                "passes it over; remove it if it changes nothing, or use another model"
            )


def _check_rope(config: Any, rope_types: tuple[str, ...], partial: bool) -> None:
    for rope in rope_parameter_sets(config).values():
        # Where it is not honoured, transformers' code either fails or turns whole heads all the same.
        for factor in (getattr(config, "partial_rotary_factor", None), rope.get("partial_rotary_factor")):
            if factor not in (None, 1.0) and not partial:
                raise UnsupportedModel(
                    f"{config.model_type}: partial_rotary_factor={factor} is not honoured by transformers' {config.model_type}, which "
                    "turns whole heads; use another model"
                )
        kind = rope.get("rope_type", "default")
        if rope_types and kind not in rope_types:
            raise UnsupportedModel(
                f"{config.model_type}: rope_type {kind!r} is not supported, only {', '.join(rope_types)}; use another model"
            )


def rope_parameter_sets(config: Any) -> dict[str | None, dict[str, Any]]:
    """The rotary parameters by the type of layer that has them, or under None where all layers have the same."""
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()) and "rope_type" not in rope:
        return {kind: parameters for kind, parameters in rope.items() if parameters}
    return {None: rope}


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _is_cohere(config: Any) -> bool:
    return str(config.model_type).startswith("cohere")


def _has_pattern(every: int, config: Any) -> bool:
    """Whether each `every`th layer, and no other, has full attention."""
    return [(layer + 1) % every == 0 for layer in range(config.num_hidden_layers)] == [
        kind == "full_attention" for kind in config.layer_types
    ]


def _changes_nothing(neutral: Callable[[Any, Any], bool], value: Any, config: Any) -> bool:
    try:
        return neutral(value, config)
    except (TypeError, AttributeError):  # a config.json may hold anything, and what is not understood is not neutral
        return False
