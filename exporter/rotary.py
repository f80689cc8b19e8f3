"""The rotary angles of a model's layers: which sets there are, and their frequencies for the caches that they are used in."""

from typing import Any

from sinkring.exporter.hooks import rotary_module
from sinkring.models.registry import Family
from sinkring.models.rope import rope_frequencies, rope_length
from sinkring.models.token_call import text_config
from sinkring.runtime.ring import RingGeometry
from torch import Tensor


def frequencies(model: Any, family: Family, rope: str, length: int) -> tuple[Tensor, float]:
    """inv_freq float32 [R/2] and the factor on cos and sin, of the set `rope` ("" for the only one) for a sequence of `length` tokens.

    Raises UnsupportedModel; see `rope_frequencies`.
    """
    if family.frequencies is not None:
        return family.frequencies(text_config(model)), 1.0
    return rope_frequencies(rotary_module(model, family), length, rope or None)


def frequencies_for(model: Any, family: Family, rope: str, policy: str, geometry: RingGeometry) -> tuple[Tensor, float]:
    """The same for a stream's cache. Raises UnsupportedModel where no one set of angles serves it."""
    length = geometry.sinks_tokens + geometry.window_tokens
    if family.frequencies is None:
        length = rope_length(text_config(model), policy, geometry.sinks_tokens, geometry.window_tokens, rope or None)
    return frequencies(model, family, rope, length)
