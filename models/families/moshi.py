"""Moshi, its temporal transformer with the text head: a rotary module in each attention, and a window that only the cache knows."""

from typing import Any

from sinkring.models.registry import Family


def _window(config: Any) -> tuple[int | None, ...]:
    return (config.sliding_window,) * config.num_hidden_layers


MOSHI = Family(
    name="moshi",
    examples="Moshika, Moshiko (text)",
    special="a rotary module in each attention; the audio side is not exported",
    windows="all layers",
    rotary="model.layers.0.self_attn.rotary_emb",
    window=_window,
)
