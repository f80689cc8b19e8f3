"""Moshi, its temporal transformer with the text head: a rotary module in each attention, and a window that only the cache knows.

Of a whole Moshi it is the part called `decoder`: `MoshiForConditionalGeneration.from_pretrained(...).decoder.save_pretrained(folder)`.
"""

from typing import Any

from sinkring.models.registry import Family


def _window(config: Any) -> tuple[int | None, ...]:
    return (config.sliding_window,) * config.num_hidden_layers


MOSHI = Family(
    name="moshi",
    examples="Moshika, Moshiko (text)",
    special="its temporal transformer, the part called decoder",
    windows="all layers",
    rotary="model.layers.0.self_attn.rotary_emb",
    window=_window,
)
