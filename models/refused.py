"""Architectures that are refused by name, with the reason and what to do."""

from sinkring.models.errors import UnsupportedModel

_LEARNED = (
    "its positions are learned, one row for each up to the trained context, so it has none for a stream that goes on; "
    "use a model with rotary positions or ALiBi"
)
_STATE = (
    "it has layers with a recurrent state (state space or linear attention) instead of a cache of keys and values; "
    "use a transformer decoder"
)
_LATENT = "it caches a latent of keys and values (MLA), not keys and values; use a model with grouped queries"
_CROSS = "its decoder attends to an encoder (cross-attention); use a decoder-only model"
_CHUNKED = "its layers attend within fixed chunks of the sequence, which no ring stores; use a model with full or sliding-window attention"
_CODES = (
    "each of its steps takes the codes of several audio codebooks and gives such codes, by a second decoder inside the step; "
    "use a decoder that gives one token a step"
)
_AUDIO = "its audio encoder's rows stand in the place of tokens; use its text decoder, a Llama, by itself and with --inputs embeddings"

REFUSED = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt", "ctrl", "openai-gpt", "xglm", "codegen2", "imagegpt"), _LEARNED),
    **dict.fromkeys(
        (
            "mamba",
            "mamba2",
            "falcon_mamba",
            "rwkv",
            "jamba",
            "bamba",
            "zamba",
            "zamba2",
            "recurrent_gemma",
            "granitemoehybrid",
            "falcon_h1",
            "nemotron_h",
            "lfm2",
            "lfm2_moe",
            "minimax",
            "qwen3_next",
            "olmo_hybrid",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "kimi_linear",
            "xlstm",
        ),
        _STATE,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "kimi_k2", "longcat_flash", "youtu", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("t5", "bart", "mbart", "marian", "pegasus", "blenderbot", "whisper", "mllama", "t5gemma", "musicgen"), _CROSS),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKED),
    **dict.fromkeys(("csm",), _CODES),
    **dict.fromkeys(("voxtral",), _AUDIO),
}


def refuse_by_name(architecture: str | None) -> None:
    """Raises UnsupportedModel, with the reason, if that `model_type` is one of REFUSED."""
    if architecture is not None and (reason := REFUSED.get(architecture)):
        raise UnsupportedModel(f"architecture {architecture!r} cannot be a stream: {reason}")
