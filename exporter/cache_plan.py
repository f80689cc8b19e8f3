"""Which cache each layer gets: its trained window, or what the user asked for where it attends to everything."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sinkring.exporter.hooks import AttentionCall, decoder_layers, hooked
from sinkring.exporter.rotary import frequencies
from sinkring.models.registry import Family
from sinkring.models.token_call import text_config
from sinkring.runtime.errors import GeometryError, UnsupportedError
from sinkring.runtime.manifest import Ring
from sinkring.runtime.ring import RingGeometry
from torch import Tensor

# TensorRT pads a cache whose slots are no multiple of this, at the price of a copy of it per layer and chunk.
CAPACITY_MULTIPLE = 8
SINKS, WINDOW = 4, 256


@dataclass(frozen=True)
class LayerAttention:
    """What one layer was seen to ask for. window: trained, in tokens, None for full attention; rope: see AttentionCall."""

    query_heads: int
    kv_heads: int
    head_size: int
    window: int | None
    rope: str | None


@dataclass(frozen=True)
class CacheRequest:
    """What the user asks of the layers with full attention, and of all: tokens. None is not asked."""

    sinks: int | None
    window: int | None
    capacity: int | None
    chunk: int
    slack: int

    def geometry(self) -> RingGeometry:
        """Of a layer with full attention."""
        if self.capacity is not None:
            return RingGeometry.linear(self.capacity, capacity_multiple=CAPACITY_MULTIPLE)
        sinks, window = SINKS if self.sinks is None else self.sinks, WINDOW if self.window is None else self.window
        return self._ring(sinks, window)

    def sliding(self, window: int) -> RingGeometry:
        """Of a layer with a trained window. A cache that is full before the window is needs no ring."""
        if self.capacity is not None and self.capacity <= window:
            return self.geometry()
        return self._ring(0, window)

    def _ring(self, sinks: int, window: int) -> RingGeometry:
        return RingGeometry.for_chunk(sinks, window, self.chunk, self.slack, capacity_multiple=CAPACITY_MULTIPLE)


@dataclass(frozen=True)
class CachePlan:
    """layers: one entry each. rings: each distinct geometry once, that of full attention first, with its layers."""

    layers: tuple[LayerAttention, ...]
    rings: tuple[Ring, ...]

    def ring_of(self, layer: int) -> int:
        """Index of the layer's ring."""
        return next(index for index, ring in enumerate(self.rings) if layer in ring.layers)

    def geometry_of(self, layer: int) -> RingGeometry:
        return self.rings[self.ring_of(layer)].geometry

    def ropes(self) -> dict[str, RingGeometry]:
        """Each set of angles that a layer uses, with the geometry of the longest cache that it is used in."""
        found: dict[str, RingGeometry] = {}
        for layer, seen in enumerate(self.layers):
            if seen.rope is not None:
                here = self.geometry_of(layer)
                found[seen.rope] = max(found.get(seen.rope, here), here, key=lambda one: one.sinks_tokens + one.window_tokens)
        return found


def write_index_name(ring: int) -> str:
    return f"write_index.{ring}"


@torch.no_grad()
def observe_layers(model: Any, family: Family, context_tokens: int) -> tuple[LayerAttention, ...]:
    """Run two tokens through the model and see what each layer asks of its attention.

    A window that is no shorter than the trained context never acts there: such a layer has full attention.
    Raises UnsupportedError for a model whose layers do not attend, not with heads of one kind, or without the window of its configuration.
    """
    seen: dict[int, LayerAttention] = {}
    windows = _configured_windows(text_config(model), len(decoder_layers(model, family)))
    # Of a model that takes more than token ids its layers, and not its embedding, are what is looked at.
    tokens = torch.zeros(1, 2, text_config(model).hidden_size) if family.beside_tokens else torch.zeros(1, 2, dtype=torch.int64)

    def no_angles(name: str) -> tuple[Tensor, Tensor]:
        half = torch.ones(1, 2, rotated_pairs(model, family, name))
        return half, torch.zeros_like(half)

    def watch(call: AttentionCall) -> Tensor:
        if (call.window or None) != windows[call.layer]:
            raise UnsupportedError(
                f"layer {call.layer}: the configuration says {_said(windows[call.layer])} and its attention asks for {_said(call.window)}: "
                "this model is not supported"
            )
        window = call.window if call.window and call.window < context_tokens else None
        seen[call.layer] = LayerAttention(call.query.shape[1], call.key.shape[1], call.key.shape[3], window, call.rope)
        if call.value.shape != call.key.shape:
            keys, values = tuple(call.key.shape), tuple(call.value.shape)
            raise UnsupportedError(f"layer {call.layer}: keys are {keys} and values {values}: not supported")
        return torch.zeros_like(call.query)

    with hooked(model, family, no_angles, watch):
        family.run(model, tokens, torch.arange(2)[None], None)
    count = len(decoder_layers(model, family))
    if missing := [layer for layer in range(count) if layer not in seen]:
        raise UnsupportedError(f"layers {missing} of {count} never call the attention function: this model is not supported")
    layers = tuple(seen[layer] for layer in range(count))
    if len(kinds := {(layer.query_heads, layer.kv_heads, layer.head_size) for layer in layers}) > 1:
        raise UnsupportedError(f"layers have heads of different kinds (H, G, D): {sorted(kinds)}: not supported")
    return layers


def _configured_windows(config: Any, layers: int) -> tuple[int | None, ...]:
    """Of each layer in tokens. Some attentions leave a window to the mask that transformers makes, and a ring would not hear of it."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _said(window: int | None) -> str:
    return f"a sliding window of {window} tokens" if window else "full attention"


def rotated_pairs(model: Any, family: Family, rope: str) -> int:
    """R/2 of a set of angles."""
    return len(frequencies(model, family, rope, 1)[0])


def plan_caches(layers: tuple[LayerAttention, ...], request: CacheRequest) -> CachePlan:
    """Raises GeometryError for numbers that do not fit together, or that ask something of full attention where no layer has it."""
    if all(layer.window is not None for layer in layers):
        windows = sorted({layer.window for layer in layers if layer.window is not None})
        for name, value in (("sinks", request.sinks), ("window", request.window), ("capacity", request.capacity)):
            if value is not None:
                raise GeometryError(
                    f"{name}={value}: every layer of this model has its trained window, of {', '.join(map(str, windows))} tokens, which is "
                    f"neither cut nor enlarged, and needs no sinks; leave out {name}"
                )
    geometries = [request.geometry() if layer.window is None else request.sliding(layer.window) for layer in layers]
    full = [geometry for geometry, layer in zip(geometries, layers, strict=True) if layer.window is None]
    order = list(dict.fromkeys([*full, *sorted(geometries, key=lambda geometry: geometry.window_tokens)]))
    rings = tuple(
        Ring(write_index_name(index), geometry, tuple(layer for layer, other in enumerate(geometries) if other == geometry))
        for index, geometry in enumerate(order)
    )
    if request.slack and all(not ring.geometry.wraps for ring in rings):
        raise GeometryError(
            f"slack={request.slack} with capacity={request.capacity}: any number of tokens can be rolled back then; leave out slack"
        )
    return CachePlan(layers, rings)


def each_state(plan: CachePlan) -> Iterator[tuple[int, int, str]]:
    """(layer, ring, name) of every key and value cache, in the order of the graph's inputs."""
    for layer in range(len(plan.layers)):
        for name in ring_names(layer):
            yield layer, plan.ring_of(layer), name


def ring_names(layer: int) -> tuple[str, str]:
    """Names of a layer's two ring inputs; the updated ring is the output `NAME.updated`."""
    return f"cache.{layer}.k", f"cache.{layer}.v"


def updated_name(state: str) -> str:
    return f"{state}.updated"
