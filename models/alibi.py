"""ALiBi (arXiv 2108.12409), exact: a key's score is lowered by slope times its distance from the query.

transformers adds slope times absolute position, whose rounding grows with the position: in float32 for BLOOM, in bfloat16, which has eight
bits, for Falcon. The softmax sees differences only, so both mean the distance. The slopes here are those that transformers makes (Falcon's
are rounded to bfloat16), the distance times the slope is float32. Its eager Falcon adds the bias twice, once in the mask, its `sdpa`
once, as the model's own code does: Falcon with ALiBi runs with `sdpa`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from sinkring.models.patch import modeling_of
from sinkring.models.token_call import decoder_of, text_config
from torch import Tensor
from transformers import PreTrainedModel


def alibi_slopes(model: PreTrainedModel) -> Tensor | None:
    """float32 [H], what each head's score loses per token of distance, before Falcon scales it; None for a model without ALiBi."""
    config, modeling = text_config(model), modeling_of(model)
    if config.model_type == "bloom" or (config.model_type == "falcon" and config.alibi):
        bias = modeling.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), config.num_attention_heads, torch.float32)  # [H, 1, 2]
    elif config.model_type == "mpt":
        # As MptModel calls it: whatever alibi and alibi_bias_max say in its configuration.
        bias = modeling.build_mpt_alibi_tensor(config.num_attention_heads, 2)
    else:
        return None
    slopes: Tensor = (bias[:, 0, 1] - bias[:, 0, 0]).float()
    return slopes


def attention_with_alibi(model: PreTrainedModel) -> str:
    """The attention to run the model with, see above."""
    return "sdpa" if text_config(model).model_type == "falcon" and text_config(model).alibi else "eager"


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """float32 [H, T, L] for queries at positions [T] and keys at positions [L] int64."""
    return -slopes[:, None, None] * (queries[:, None] - keys[None, :]).float()


@contextmanager
def exact_alibi(model: PreTrainedModel, tokens: int, mask: Tensor) -> Iterator[Tensor]:
    """Within the block a pass over N = `tokens` adds the exact bias. Yields the mask for full layers: `mask` [1, 1, N, N], or with bias."""
    slopes = alibi_slopes(model)
    if slopes is None:
        yield mask
        return
    positions = torch.arange(tokens)
    bias = alibi_bias(slopes, positions, positions).to(mask.dtype)
    modeling = modeling_of(model)
    kind = text_config(model).model_type
    if kind == "bloom":
        with patch.object(modeling, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads)):
            yield mask + bias
    elif kind == "falcon":
        with patch.object(modeling, "build_alibi_tensor", lambda seen, heads, dtype: bias):
            yield mask
    else:
        with patch.object(decoder_of(model), "build_mpt_alibi_tensor", lambda *_, **__: bias):
            yield mask


@contextmanager
def alibi_by_cache_index(model: PreTrainedModel, longest: int) -> Iterator[None]:
    """Within the block a step's bias is that of the indices in its cache, of at most `longest` tokens, in float32."""
    slopes = alibi_slopes(model)
    kind = text_config(model).model_type
    if slopes is None or kind == "bloom":  # slope times cache index in float32 already
        yield
    elif kind == "falcon":

        def of_cache(seen: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            last = seen.shape[-1] - 1
            return alibi_bias(slopes, torch.tensor([last]), torch.arange(last + 1)).to(dtype)

        with patch.object(modeling_of(model), "build_alibi_tensor", of_cache):
            yield
    else:
        # MPT takes the last of a table that is as long as its context.
        decoder: Any = decoder_of(model)
        make = decoder.build_mpt_alibi_tensor
        with patch.object(decoder, "build_mpt_alibi_tensor", lambda heads, length, **_: make(heads, max(length, longest))):
            yield
