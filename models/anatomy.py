"""What each layer of a decoder does with keys, read off the model itself: how many it sees, and whether and how it turns them.

Windows are the configuration's, as Hugging Face's own caches and masks take them. Rotations are measured: tokens that all stand at one
position attend to each other as at position 0, so the keys of any layer differ by its rotation and by nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sinkring.models.errors import UnsupportedModel
from sinkring.models.patch import attention_implementation
from sinkring.models.rotation import AngleSet, Rotation, angle_sets
from sinkring.models.token_call import run_decoder, text_config
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

_PROBE_TOKENS = 3
# Far enough for two bases to differ in all but their slowest entries, near enough for float32 angles.
_PROBE_POSITION = 997
# Of the largest entry of a key: float32 angles at that position are off by 3e-5 rad.
_TURN_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Layer:
    """window: tokens that a query sees, itself included, as trained; None for full attention. rotation: None if keys are not turned."""

    window: int | None
    rotation: Rotation | None


def read_layers(model: PreTrainedModel) -> tuple[Layer, ...]:
    """All layers, first to last. Runs the model over a few tokens. Raises UnsupportedModel for what is not known."""
    return tuple(Layer(window, rotation) for window, rotation in zip(trained_windows(model), _rotations(model), strict=True))


def trained_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """Of each layer. A window as long as the trained context or longer never acted in training: it counts as full attention."""
    config = text_config(model)
    name = config.model_type
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"{name}: has layers of type {', '.join(unknown)}; supported are full_attention and sliding_attention")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise UnsupportedModel(f"{name}: its attention is not causal; only decoders that see the past alone are supported")
    if acts_as_full(config):
        window = None
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@contextmanager
def trained_window_replaced(model: PreTrainedModel, window: int) -> Iterator[None]:
    """Within the block the layers with a sliding window have this one: for a control, a model that is wrong by a token."""
    config = text_config(model)
    before = config.sliding_window
    config.sliding_window = window
    try:
        yield
    finally:
        config.sliding_window = before


def acts_as_full(config: Any) -> bool:
    """Whether the configuration's sliding window is as long as the trained context."""
    window, context = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    return window is not None and context is not None and window >= context


def geometry_of(window: int | None, sinks: int, full_window: int) -> tuple[int, int]:
    """(S, W) of a layer with this trained window, where full attention becomes `sinks` and `full_window`."""
    return (sinks, full_window) if window is None else (0, window)


def longest_reach(layers: tuple[Layer, ...], angles: AngleSet, sinks: int, window: int) -> int:
    """S + W of the layer, among those with these angles, whose tokens meet over the longest distance; 1 if none has them."""
    reaches = [sum(geometry_of(layer.window, sinks, window)) for layer in layers if layer.rotation and layer.rotation.angles == angles]
    return max(reaches, default=1)


def _rotations(model: PreTrainedModel) -> list[Rotation | None]:
    sets = angle_sets(model)
    layers = text_config(model).num_hidden_layers
    if not sets:
        return [None] * layers
    far = min(_PROBE_POSITION, getattr(text_config(model), "max_position_embeddings", _PROBE_POSITION + 1) - 1)
    still, turned = _keys_at(model, 0), _keys_at(model, far)
    if len(still) != layers:
        raise UnsupportedModel(f"{text_config(model).model_type}: {len(still)} of {layers} layers keep keys in their cache; all must")
    candidates = [Rotation(angles, interleaved) for angles in sets for interleaved in (False, True)]
    return [_match(model, number, candidates, *keys, far) for number, keys in enumerate(zip(still, turned, strict=True))]


def _keys_at(model: PreTrainedModel, position: int) -> list[Tensor]:
    """Of each layer, the keys [G, T, D] of a few tokens that all stand at `position`."""
    cache: Any = DynamicCache()
    ids = torch.arange(_PROBE_TOKENS) + 1
    with torch.no_grad(), attention_implementation(model, "eager"):
        run_decoder(model, ids, torch.full((_PROBE_TOKENS,), position), cache)
    return [layer.keys[0] for layer in cache.layers]


def _match(model: PreTrainedModel, number: int, candidates: list[Rotation], still: Tensor, turned: Tensor, far: int) -> Rotation | None:
    limit = _TURN_TOLERANCE * float(still.abs().max())
    if float((turned - still).abs().max()) <= limit:
        return None
    positions = torch.full((still.shape[-2],), far)
    errors = [
        float((candidate.turn(still, positions, far + 1) - turned).abs().max())
        if 2 * len(candidate.angles.at_length(far + 1)[0]) <= still.shape[-1]
        else float("inf")
        for candidate in candidates
    ]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if not errors[best] <= limit:
        raise UnsupportedModel(
            f"{text_config(model).model_type}: layer {number} rotates its keys in a way that the oracle does not know: the nearest known "
            f"one is off by {errors[best]:.2g}, more than {limit:.2g}"
        )
    return candidates[best]
