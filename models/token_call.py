"""How a Hugging Face decoder is run on token ids alone or on embedded rows, also one that is part of a speech model."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that holds the embedding and the decoder layers, with the configuration that these read as its `config`."""
    base = model.base_model
    decoder = getattr(base, "language_model", base)
    assert isinstance(decoder, nn.Module)
    return decoder


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder."""
    return decoder_of(model).config


def run_decoder(model: PreTrainedModel, fed: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
    """Logits [N, V] for ids [N] int64 at `positions` [N] int64 (default: 0, 1, ...), with the keys of `cache` before them.

    Or for rows [N, hidden], what the layers are given in place of ids. Of ids alone
    Kyutai speech-to-text hears padding from all its audio codebooks; Voxtral Realtime hears nothing and has its default delay.
    """
    options: dict[str, Any] = {"use_cache": cache is not None}
    # One whose decoder takes none has no positions but in its attention.
    if positions is not None and "position_ids" in inspect.signature(decoder_of(model).forward).parameters:
        options["position_ids"] = positions[None]
    if cache is not None:
        # transformers 5.24 calls it cache, earlier versions past_key_values.
        named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        options[named] = cache
    base: Any = model.base_model
    if hasattr(base, "time_embedding"):
        delay = torch.full((1,), model.config.default_num_delay_tokens, dtype=model.dtype)
        condition = base.time_embedding(delay)[None]
        named = "inputs_embeds" if fed.is_floating_point() else "input_ids"
        hidden = decoder_of(model)(**{named: fed[None]}, t_cond=condition, **options).last_hidden_state
        spoken: Tensor = model.lm_head(hidden)[0]
        return spoken
    if fed.is_floating_point():
        embedded: Tensor = model(inputs_embeds=fed[None].to(model.dtype), **options).logits
        return embedded[0]
    tokens = fed[None]
    if hasattr(model.config, "audio_pad_token_id"):
        silence = torch.full((len(fed), model.config.num_codebooks), model.config.audio_pad_token_id)
        tokens = torch.cat((fed[:, None], silence), dim=1)[None]
    logits: Tensor = model(input_ids=tokens, **options).logits
    return logits[0]
