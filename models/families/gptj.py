"""GPT-J: interleaved pairs, part of each head turns, and sine comes before cosine."""

from typing import Any

import torch
from sinkring.models.registry import Family
from torch import Tensor


def _frequencies(config: Any) -> Tensor:
    """[R/2], as transformers' `create_sinusoidal_positions` has them; its table itself ends with the trained context."""
    rotated = config.rotary_dim or config.hidden_size // config.num_attention_heads
    return 1.0 / (10000 ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated))


GPTJ = Family(
    name="gptj",
    examples="GPT-J 6B",
    special="partial, interleaved rotary, parallel residual",
    since="5.24",  # before, its model has no rotary module
    layers="transformer.h",
    attention="attn",
    rotary="transformer.rotary_emb",
    frequencies=_frequencies,
    interleaved=True,
    swapped=True,
)
