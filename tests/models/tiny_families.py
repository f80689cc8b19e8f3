"""Tiny random models of every decoder family, as data: one row a family (or a variant of one), its pattern of layers kept.

Four query heads of 8 dimensions (gpt_oss and cohere2: 16), two key/value heads where a family groups them, vocabulary 97, windows of 5 to 8
tokens where a family has sliding layers, and two or four layers, so that each kind of layer occurs. Weights are drawn as in `tiny.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
CONTEXT = 256

_UNGROUPED: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
_SIZES: dict[str, Any] = {**_UNGROUPED, "num_key_value_heads": 2}
_MLP = {"intermediate_size": 48}
_HEAD = {"head_dim": 8}
_SLIDING_1_OF_2 = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_SLIDING_3_OF_4 = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
_YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.7, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}
_TINY_CODEC = {
    "model_type": "mimi",
    "hidden_size": 16,
    "num_filters": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "codebook_size": 8,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": 2,
    "upsample_groups": 16,
}


@dataclass(frozen=True)
class TinyFamily:
    """One row. name: the configuration's model_type, or that and a variant; model, config: class names in transformers.

    sliding: trained window of each layer in tokens, None for a layer with full attention; rotary: whether each layer's keys are turned.
    """

    name: str
    model: str
    config: str
    settings: dict[str, Any]
    sliding: tuple[int | None, ...] = (None, None)
    rotary: tuple[bool, ...] = (True, True)

    @property
    def layers(self) -> int:
        return len(self.sliding)

    @property
    def has_full_layers(self) -> bool:
        return None in self.sliding


def _row(
    name: str,
    classes: str,
    settings: dict[str, Any],
    sliding: tuple[int | None, ...] = (None, None),
    rotary: tuple[bool, ...] | None = None,
) -> TinyFamily:
    """`classes`: what the names of the configuration and the causal model begin with."""
    return TinyFamily(name, f"{classes}ForCausalLM", f"{classes}Config", settings, sliding, rotary or (True,) * len(sliding))


TINY_FAMILIES: tuple[TinyFamily, ...] = (
    _row("llama", "Llama", {**_SIZES, **_MLP, **_HEAD}),
    _row(
        "smollm3",
        "SmolLM3",
        {**_SIZES, **_MLP, "num_hidden_layers": 4, "no_rope_layer_interval": 2},
        (None,) * 4,
        (True, False, True, False),
    ),
    _row("mistral", "Mistral", {**_SIZES, **_MLP, **_HEAD, "sliding_window": 6}, (6, 6)),
    _row("mistral-full", "Mistral", {**_SIZES, **_MLP, **_HEAD, "sliding_window": None}),
    _row("ministral", "Ministral", {**_SIZES, **_MLP, **_HEAD, **_SLIDING_1_OF_2, "sliding_window": 5}, (5, None, 5, None)),
    _row(
        "mixtral",
        "Mixtral",
        {**_SIZES, **_MLP, **_HEAD, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    _row("qwen2", "Qwen2", {**_SIZES, **_MLP}),
    _row(
        "qwen2-sliding",
        "Qwen2",
        {**_SIZES, **_MLP, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        (None, None, 7, 7),
    ),
    _row("qwen3", "Qwen3", {**_SIZES, **_MLP, **_HEAD}),
    _row(
        "qwen3_moe",
        "Qwen3Moe",
        {**_SIZES, **_MLP, **_HEAD, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    _row("gemma", "Gemma", {**_SIZES, **_MLP, **_HEAD, "num_key_value_heads": 1}),
    _row(
        "gemma2",
        "Gemma2",
        {
            **_SIZES,
            **_MLP,
            **_HEAD,
            **_SLIDING_1_OF_2,
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
        (6, None, 6, None),
    ),
    TinyFamily(
        "gemma3_text",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_SIZES,
            **_MLP,
            **_HEAD,
            **_SLIDING_3_OF_4,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
        (5, 5, 5, None),
        (True,) * 4,
    ),
    _row("phi", "Phi", {**_SIZES, **_MLP, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    _row("phi3", "Phi3", {**_SIZES, **_MLP, "original_max_position_embeddings": CONTEXT}),
    _row("phi3-longrope", "Phi3", {**_SIZES, **_MLP, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE}),
    _row("olmo", "Olmo", {**_SIZES, **_MLP, "clip_qkv": 2.0}),
    _row("olmo2", "Olmo2", {**_SIZES, **_MLP}),
    _row(
        "olmo3",
        "Olmo3",
        {
            **_SIZES,
            **_MLP,
            **_SLIDING_3_OF_4,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        (6, 6, 6, None),
    ),
    _row(
        "granite",
        "Granite",
        {
            **_SIZES,
            **_MLP,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    _row(
        "stablelm",
        "StableLm",
        {**_SIZES, **_MLP, "partial_rotary_factor": 0.25, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    _row("starcoder2", "Starcoder2", {**_SIZES, **_MLP, "sliding_window": 7}, (7, 7)),
    _row("gpt_neox", "GPTNeoX", {**_UNGROUPED, **_MLP, "rotary_pct": 0.25}),
    _row("gptj", "GPTJ", {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_inner": 48}),
    _row("falcon", "Falcon", {**_UNGROUPED, "ffn_hidden_size": 48}),
    _row(
        "falcon-new",
        "Falcon",
        {**_UNGROUPED, "ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    _row(
        "falcon-alibi",
        "Falcon",
        {
            **_UNGROUPED,
            "ffn_hidden_size": 48,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
        rotary=(False, False),
    ),
    _row(
        "mpt",
        "Mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": CONTEXT, "attn_config": {"clip_qkv": 2.5}},
        rotary=(False, False),
    ),
    # Six heads: the slopes of a number that is no power of two are made in another way.
    _row("bloom", "Bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 6}, rotary=(False, False)),
    _row("cohere", "Cohere", {**_SIZES, **_MLP, "logit_scale": 0.5, "use_qk_norm": True}),
    _row(
        "cohere2",
        "Cohere2",
        {**_SIZES, **_MLP, **_SLIDING_3_OF_4, "hidden_size": 64, "sliding_window": 6, "logit_scale": 0.5},
        (6, 6, 6, None),
        (True, True, True, False),
    ),
    _row("glm", "Glm", {**_SIZES, **_MLP, **_HEAD, "partial_rotary_factor": 0.5}),
    _row("glm4", "Glm4", {**_SIZES, **_MLP, **_HEAD, "partial_rotary_factor": 0.5}),
    _row(
        "exaone4",
        "Exaone4",
        {**_SIZES, **_MLP, "num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 4},
        (6, 6, 6, None),
        (True, True, True, False),
    ),
    _row(
        "gpt_oss",
        "GptOss",
        {
            **_SIZES,
            **_MLP,
            **_SLIDING_1_OF_2,
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_YARN, "rope_theta": 1.5e5, "truncate": False},
        },
        (6, None, 6, None),
    ),
    _row("arcee", "Arcee", {**_SIZES, **_MLP, **_HEAD}),
    _row("helium", "Helium", {**_SIZES, **_MLP, **_HEAD}),
    _row("seed_oss", "SeedOss", {**_SIZES, **_MLP, **_HEAD}),
    _row("ernie4_5", "Ernie4_5", {**_SIZES, **_MLP, **_HEAD, "use_bias": True}),
    _row("olmoe", "Olmoe", {**_SIZES, **_MLP, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 2.0}),
    _row(
        "granitemoe",
        "GraniteMoe",
        {
            **_SIZES,
            **_MLP,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    _row("nemotron", "Nemotron", {**_SIZES, **_MLP, **_HEAD, "rope_parameters": _HALF}),
    _row("persimmon", "Persimmon", {**_UNGROUPED, **_MLP, "rope_parameters": _HALF}),
    _row(
        "qwen2_moe",
        "Qwen2Moe",
        {
            **_SIZES,
            **_MLP,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    _row("moshi", "Moshi", {**_SIZES, **_HEAD, "ffn_dim": 48, "sliding_window": CONTEXT, "num_codebooks": 2}),
    _row("moshi-sliding", "Moshi", {**_SIZES, **_HEAD, "ffn_dim": 48, "sliding_window": 8, "num_codebooks": 2}, (8, 8)),
    TinyFamily(
        "kyutai_speech_to_text",
        "KyutaiSpeechToTextForConditionalGeneration",
        "KyutaiSpeechToTextConfig",
        {
            **_SIZES,
            **_HEAD,
            "ffn_dim": 48,
            "sliding_window": 8,
            "num_codebooks": 2,
            "codebook_vocab_size": 11,
            "audio_bos_token_id": 10,
            "audio_pad_token_id": VOCAB + 2 * 11,
            "codec_config": _TINY_CODEC,
        },
        (8, 8),
    ),
    TinyFamily(
        "voxtral_realtime",
        "VoxtralRealtimeForConditionalGeneration",
        "VoxtralRealtimeConfig",
        {
            "text_config": {
                "model_type": "voxtral_realtime_text",
                **_SIZES,
                **_MLP,
                **_HEAD,
                "sliding_window": 7,
                "vocab_size": VOCAB,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "audio_config": {
                "model_type": "voxtral_realtime_encoder",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 8,
                "num_mel_bins": 4,
                "vocab_size": VOCAB,
            },
        },
        (7, 7),
    ),
)


def find_row(name: str) -> TinyFamily:
    """The row of that name."""
    return next(row for row in TINY_FAMILIES if row.name == name)


def tiny_model(row: TinyFamily | str, seed: int = 0, std: float = 0.3, **settings: Any) -> PreTrainedModel:
    """The model of a row in float32, eval mode, no gradients, its weights drawn from `seed` alone; `settings` go over its decoder's.

    Matrices and biases are normal with deviation `std`, the weights of norms normal around 1. The embedding of a padding token is zero,
    as in a trained model.
    """
    row = find_row(row) if isinstance(row, str) else row
    tokens = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if inner := row.settings.get("text_config"):
        chosen = {**row.settings, "text_config": {**inner, **settings}}
    else:
        chosen = {**tokens, **row.settings, **settings}
    config = getattr(transformers, row.config)(**chosen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, row.model)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            around = 1.0 if weight.dim() == 1 and name.endswith("weight") else 0.0
            weight.copy_(around + std * torch.randn(weight.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0
    return model.float().eval().requires_grad_(False)
