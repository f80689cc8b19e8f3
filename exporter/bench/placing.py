"""Streams at a position without the tokens before it: to feed a million tokens only to time the next one would take hours."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.decoder import Decoder
from sinkring.runtime.manifest import Manifest

# What `Stream.capture` gives and `Stream.install` takes.
StreamState = tuple[dict[str, Any], dict[str, NDArray[Any]]]


def full_at(decoder: Decoder) -> int:
    """The position from which on every slot has been written: C of the largest ring. Of linear caches, half of the shortest capacity."""
    geometries = [ring.geometry for ring in decoder.manifest.rings]
    most = [geometry.most_tokens for geometry in geometries if geometry.most_tokens is not None]
    return min(most) // 2 if most else max(geometry.capacity for geometry in geometries)


def place(state: StreamState, manifest: Manifest, position: int) -> StreamState:
    """A full stream's state as if `position` tokens had been fed: each key and value in the slot of its token, slots not yet reached empty.

    Keys stay rotated as they are, so the logits are not those of a stream of that age (the conformance suite's I9 turns the keys, and
    compares). Positions, angles, write indices, masks and the numbers' sizes are its own: all that a step's time could depend on.
    """
    record, tensors = state
    older = position - record["fed"]
    placed = dict(tensors)
    for entry in manifest.states:
        if entry.ring is None:
            continue
        geometry = manifest.rings[entry.ring].geometry
        sinks, others = np.split(tensors[entry.name], [geometry.sinks_tokens], axis=2)
        placed[entry.name] = np.concatenate([sinks, np.roll(others, older % geometry.slots, axis=2)], axis=2)
        placed[entry.name][:, :, position:] = entry.initial
    return {**record, "fed": position, "reached": position}, placed
