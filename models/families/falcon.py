"""Falcon: one or a few KV heads for all queries, rotary or linear biases (ALiBi), an attention of its own."""

from typing import Any

import torch
from sinkring.models.families.bloom import alibi_slopes
from sinkring.models.registry import Family


def _slopes(config: Any) -> tuple[float, ...] | None:
    """Biases are added before the scores are scaled. The slopes are bfloat16, as trained; transformers' product of them with a position
    is bfloat16 too and so rounded more the older a stream is: here it is exact."""
    if not config.alibi:
        return None
    slopes = torch.tensor(alibi_slopes(config.num_attention_heads)).bfloat16().double()
    return tuple((slopes * (config.hidden_size // config.num_attention_heads) ** -0.5).tolist())


def _forward(attend: Any, rotate: Any, module: Any, hidden: Any, *_: Any, position_embeddings: Any = None, **__: Any) -> tuple[Any, None]:
    mixed = module.query_key_value(hidden)
    batch, tokens, _width = mixed.shape
    heads, size = module.num_heads, module.head_dim
    # transformers repeats each KV head for its queries; the cache needs it once.
    if module.new_decoder_architecture or module.multi_query:
        groups = module.num_kv_heads
        mixed = mixed.view(batch, tokens, groups, heads // groups + 2, size)
        query = mixed[:, :, :, :-2].reshape(batch, tokens, heads, size)
        key, value = mixed[:, :, :, -2], mixed[:, :, :, -1]
    else:
        query, key, value = mixed.view(batch, tokens, heads, 3, size).unbind(3)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if not module.config.alibi:
        query, key = rotate(query, key, *position_embeddings)
    return module.dense(attend(module, query, key, value, module.inv_norm_factor)), None


FALCON = Family(
    name="falcon",
    examples="Falcon 7B, 40B, 180B, Falcon-RW",
    special="multi-query or grouped, rotary or ALiBi",
    layers="transformer.h",
    attention="self_attention",
    rotary="transformer.rotary_emb",
    alibi_slopes=_slopes,
    forward=_forward,
)
