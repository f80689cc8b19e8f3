"""RingAttention: the one high-level node between front ends and lowerings.

Inputs (dtype f is the graph's float type, r that of the caches, which may be another; those marked ? may be absent):
    query        f [B,H,T,D]    rotated with the absolute positions of its tokens
    key, value   f [B,G,T,D]    of the new tokens, the key rotated likewise
    key_ring, value_ring  r [B,G,C,D]
    position     int64 [B]      of the first new token of each row
    write_index  int64 [B]      slot of the first new token; write_index + T <= C
    shift_cos, shift_sin  ? f [B,T,R/2]   cos and sin of the (negative) angle that turns a query back to meet a sink; R <= D
    sink_logits  ? f [H]        a learned sink logit (gpt-oss): one more column of each head's softmax, which has no value and no row of the
                                cache. It has nothing to do with the sinks, which are tokens.
Outputs:
    attended     f [B,H,T,D]
    key_ring', value_ring'  r   the rings with the new rows, cast to r, in slots write_index .. write_index + T - 1
Attributes: sinks (S), window (W), slots (M), scale, interleaved, policy; optional: softcap (c; 0.0 for none), alibi_slopes ([H] or empty).

The query at position q = position + t attends, after the write, to the slots that hold A(q) (see sinkring.runtime.ring). A key's score is
    s = scale * query . key
    s = c * tanh(s / c)          with a softcap (Gemma 2)
    s = s - slope_h * distance   with slopes (ALiBi, arXiv 2108.12409)

The distance to a token at position p is q - p. Under the streaming policy (StreamingLLM, arXiv 2309.17453) sink j is seen at distance
min(q, S+W-1) - j: by its slopes, and by a query that is turned back by max(0, q - (S+W-1)) tokens for it:
rope(x, a - b) = rope(rope(x, a), -b), and keys are never touched again. A streaming node with sinks therefore has shift inputs or slopes.

`ring_attention` below is that contract in numpy, slow and plain: every lowering is tested against it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

DOMAIN = "sinkring"
OP_TYPE = "RingAttention"


@dataclass(frozen=True)
class RingAttentionAttributes:
    """The attributes of one RingAttention node; `capacity` is C = S + M."""

    sinks: int
    window: int
    slots: int
    scale: float
    policy: str
    interleaved: bool = False
    softcap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()

    @property
    def capacity(self) -> int:
        return self.sinks + self.slots


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary embedding (RoFormer, arXiv 2104.09864) of the first R entries: x [B,H,T,D]; cos, sin [B,T,R/2]."""
    half = cos.shape[-1]
    c, s = cos[:, None], sin[:, None]
    out = x.copy()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = a * c - b * s, b * c + a * s
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        out[..., :half], out[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return out


def ring_attention(
    attributes: RingAttentionAttributes,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    key_ring: np.ndarray,
    value_ring: np.ndarray,
    position: np.ndarray,
    write_index: np.ndarray,
    shift_cos: np.ndarray | None = None,
    shift_sin: np.ndarray | None = None,
    sink_logits: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The node in numpy. Shapes as above; returns new arrays (attended, key_ring', value_ring')."""
    a = attributes
    batch, heads, tokens, _ = query.shape
    groups = heads // key.shape[1]
    keys, values = key_ring.copy(), value_ring.copy()
    for b in range(batch):
        keys[b, :, write_index[b] : write_index[b] + tokens] = key[b]
        values[b, :, write_index[b] : write_index[b] + tokens] = value[b]
    sink_query = query
    if a.policy == "streaming" and a.sinks:
        assert a.alibi_slopes or shift_cos is not None, "the streaming policy needs the shift angles, or slopes"
    if a.policy == "streaming" and shift_cos is not None and shift_sin is not None:
        sink_query = rotate(query, shift_cos, shift_sin, a.interleaved)
    attended = np.zeros_like(query)
    for b in range(batch):
        for t in range(tokens):
            slots = attended_slots(a, int(position[b]) + t, int(write_index[b]) + t)
            distances = np.array(attended_distances(a, int(position[b]) + t), dtype=np.int64)
            for h in range(heads):
                scores = np.array([(sink_query if j < a.sinks else query)[b, h, t] @ keys[b, h // groups, j] * a.scale for j in slots])
                if a.softcap:
                    scores = a.softcap * np.tanh(scores / a.softcap)
                if a.alibi_slopes:
                    scores = scores - a.alibi_slopes[h] * distances
                columns = scores if sink_logits is None else np.append(scores, sink_logits[h])
                weights = np.exp(columns - columns.max())
                attended[b, h, t] = (weights / weights.sum())[: len(slots)] @ values[b, h // groups, slots]
    return attended, keys, values


def attended_slots(a: RingAttentionAttributes, position: int, slot: int) -> list[int]:
    """Slots that the query at `position`, itself stored in `slot`, attends to, by walking back through the ring."""
    sinks = [j for j in range(a.sinks) if j <= position]
    recent: list[Any] = []
    for back in range(a.window):
        if position - back < a.sinks:
            break
        recent.append(a.sinks + (slot - a.sinks - back) % a.slots)
    return sinks + recent


def attended_distances(a: RingAttentionAttributes, position: int) -> list[int]:
    """How far back the query at `position` sees each of `attended_slots`, in tokens."""
    nearest = min(position, a.sinks + a.window - 1) if a.policy == "streaming" else position
    sinks = [nearest - j for j in range(a.sinks) if j <= position]
    return sinks + [back for back in range(a.window) if position - back >= a.sinks]
