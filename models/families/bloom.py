"""BLOOM: linear biases (ALiBi), an attention of its own."""

from typing import Any

from sinkring.models.registry import Family


def _slopes(config: Any) -> tuple[float, ...]:
    """Of the ALiBi paper (arXiv 2108.12409), with the slopes in between for a number of heads that is no power of two."""
    return alibi_slopes(config.num_attention_heads)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4 * (head + 1) / power) for head in range(0, 2 * (heads - power), 2)]
    return tuple(slopes + between)


def _forward(attend: Any, _rotate: Any, module: Any, hidden: Any, residual: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    query, key, value = module._reshape(module.query_key_value(hidden))
    return residual + module.dense(attend(module, query, key, value, module.inv_norm_factor)), None


BLOOM = Family(
    name="bloom",
    examples="BLOOM, BLOOMZ",
    special="ALiBi",
    since="5.24",  # before, its slopes are made within another function
    layers="transformer.h",
    attention="self_attention",
    rotary=None,
    context=lambda config: getattr(config, "seq_length", None) or 2048,  # that of every BLOOM, should its configuration not say
    alibi_slopes=_slopes,
    forward=_forward,
)
