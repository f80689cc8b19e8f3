"""Kyutai speech-to-text: Moshi's temporal transformer, each of whose steps takes the sum of a text token's row and of audio codes' rows.

The codec that makes the codes is no part of a bundle.
"""

from typing import Any

from sinkring.models.registry import Family


def _window(config: Any) -> tuple[int | None, ...]:
    return (config.sliding_window,) * config.num_hidden_layers


def _codebooks(config: Any) -> dict[str, int]:
    return {
        "count": config.num_codebooks,
        "size": config.codebook_vocab_size,
        "first": config.vocab_size,
        "silence": config.audio_pad_token_id,
    }


KYUTAI_SPEECH_TO_TEXT = Family(
    name="kyutai_speech_to_text",
    examples="Kyutai STT 1B, 2.6B",
    special="embeddings in: a text token's and audio codes' rows, summed",
    windows="all layers",
    rotary="model.layers.0.self_attn.rotary_emb",
    window=_window,
    beside_tokens="the codes of several audio codebooks",
    lookup=lambda model: model.model.embed_tokens.embed_tokens,
    codebooks=_codebooks,
)
