"""MPT: linear biases (ALiBi) with slopes of its own, an attention of its own, clipped queries, keys and values."""

from typing import Any

from sinkring.models.errors import UnsupportedModel
from sinkring.models.registry import Family


def _slopes(config: Any) -> tuple[float, ...]:
    """As MPT has them: for a number of heads that is no power of two, every other one of the next power's, then those left out."""
    attention = config.attn_config
    if not attention.alibi:
        raise UnsupportedModel("mpt: attn_config.alibi is false, and the positions it then has are learned; use a model with ALiBi")
    for setting in ("prefix_lm", "attn_uses_sequence_id", "qk_ln"):
        if getattr(attention, setting, False):
            raise UnsupportedModel(f"mpt: attn_config.{setting} is set, which transformers' mpt passes over; use another model")
    heads = config.num_attention_heads
    power = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-attention.alibi_bias_max * (head + 1) / power) for head in range(power)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


def _forward(attend: Any, _rotate: Any, module: Any, hidden: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    shape = (*hidden.shape[:2], module.n_heads, module.head_dim)
    query, key, value = (part.reshape(shape).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    return module.out_proj(attend(module, query, key, value, module.softmax_scale)), None


MPT = Family(
    name="mpt",
    examples="MPT 7B, 30B",
    special="ALiBi, clipped q, k, v",
    layers="transformer.blocks",
    attention="attn",
    rotary=None,
    context=lambda config: config.max_seq_len,
    alibi_slopes=_slopes,
    forward=_forward,
)
