"""Voxtral Realtime, its text decoder: each step takes a token's row plus audio's; norms are scaled by how far the text lags behind.

That delay is the configuration's `default_num_delay_tokens`: another one is another bundle. The audio encoder is no part of it.
"""

from typing import Any

import torch
from sinkring.models.registry import Family
from torch import Tensor


def _step(model: Any, given: dict[str, Tensor], positions: Tensor, rows: Tensor | None) -> Tensor:
    delay = torch.full((1,), model.config.default_num_delay_tokens, dtype=model.dtype)
    condition = model.model.time_embedding(delay)[None]
    hidden = model.model.language_model(**given, position_ids=positions, use_cache=False, t_cond=condition).last_hidden_state
    logits: Tensor = model.lm_head(hidden if rows is None else hidden[:, rows])
    return logits


VOXTRAL_REALTIME = Family(
    name="voxtral_realtime",
    examples="Voxtral Mini 4B Realtime (text)",
    special="embeddings in: a token's row plus audio's; norms scaled by the delay",
    windows="all layers, if set",
    layers="model.language_model.layers",
    rotary="model.language_model.rotary_emb",
    beside_tokens="an embedding of audio",
    step=_step,
)
