"""A stream made old without feeding it: its state as it would be, had it begun `tokens` tokens earlier with the same text in the window.

Written from the definition of the cache alone: keys lie rotated by their absolute position, so ageing turns them further. The angle is
reduced to one turn with 60 digits, the keys are turned in float64.
"""

import mpmath  # type: ignore[import-untyped]  # it ships no types
import numpy as np
from sinkring.models.rotation import rotary_at_length
from sinkring.runtime.bfloat16 import from_host, to_host
from sinkring.runtime.decoder import Decoder
from sinkring.runtime.ring import RingGeometry
from sinkring.runtime.stream import Stream

from tests.parity.tiny_bundles import TinyBundle


def shift_towards(geometry: RingGeometry, now: int, age: int) -> int:
    """The smallest multiple of M, so that every token keeps its slot, that brings position `now` to `age` or later."""
    return -(-(age - now) // geometry.slots) * geometry.slots


def make_older(bundle: TinyBundle, stream: Stream, tokens: int) -> None:
    """Move a stream whose window is full on by `tokens`, a multiple of M. Under the streaming policy its sinks stay where they are."""
    geometry = bundle.geometry
    assert tokens % geometry.slots == 0
    assert stream.position >= geometry.capacity, "the window must be full"
    first = geometry.sinks_tokens if bundle.export.policy == "streaming" else 0
    rotary = rotary_at_length(bundle.model.model.rotary_emb, geometry.sinks_tokens + geometry.window_tokens)
    cos, sin = exact_turn(rotary.inv_freq.numpy(), tokens)
    backend = stream._decoder.backend
    state = backend.read_row(stream.row)
    dtype = stream._decoder.manifest.cache_dtype
    for name, ring in state.items():
        if name.endswith(".k"):
            one, two = np.split(from_host(ring[:, :, first:], dtype).astype(np.float64), 2, axis=-1)
            ring[:, :, first:] = to_host(np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1), dtype)
    backend.write_row(stream.row, state)
    stream._fed += tokens


def exact_turn(inv_freq: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of tokens * inv_freq, float64 [R/2]; inv_freq radians per token, its float32 values taken as exact."""
    with mpmath.workdps(60):
        angles = [mpmath.mpf(tokens) * mpmath.mpf(float(frequency)) for frequency in inv_freq]
        return np.array([float(mpmath.cos(a)) for a in angles]), np.array([float(mpmath.sin(a)) for a in angles])


def continue_at_age(bundle: TinyBundle, decoder: Decoder, ids: np.ndarray, young: int, tokens: int) -> np.ndarray:
    """Feed `young` tokens, move the stream on by `tokens`, feed the rest in steps and chunks: float32 [N-young,V]."""
    with decoder.stream() as stream:
        stream.feed(ids[:young])
        if tokens:
            make_older(bundle, stream, tokens)
        parts, start = [], young
        for length in (1, 1, 5, 1, 2, len(ids)):
            parts.append(stream.feed(ids[start : start + length], all_logits=True))
            start += length
        assert stream.position == len(ids) + tokens
    return np.concatenate(parts)
