"""RingAttention: the one high-level node between front ends and lowerings.

Inputs (dtype f is the graph's float type):
    query        f [B,H,T,D]    rotated with the absolute positions of its tokens
    key, value   f [B,G,T,D]    of the new tokens, the key rotated likewise
    key_ring, value_ring  f [B,G,C,D]
    position     int64 [B]      of the first new token of each row
    write_index  int64 [B]      slot of the first new token; write_index + T <= C
    shift_cos, shift_sin  f [B,T,R/2]   streaming policy only: cos and sin of the (negative) angle that turns a query back to meet a sink
Outputs:
    attended     f [B,H,T,D]
    key_ring', value_ring'      the rings with the new rows in slots write_index .. write_index + T - 1
Attributes: sinks (S), window (W), slots (M), scale, interleaved, policy.

The query at position q = position + t attends, after the write, to the slots that hold A(q) (see sinkring.runtime.ring). Under the
streaming policy (StreamingLLM, arXiv 2309.17453) a sink is seen at distance min(q, S+W-1) - j, so its query is turned back by
max(0, q - (S+W-1)) tokens: rope(x, a - b) = rope(rope(x, a), -b), and keys are never touched again.

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

    @property
    def capacity(self) -> int:
        return self.sinks + self.slots

    @property
    def turns_sinks(self) -> bool:
        """Whether sinks are met by a query of their own; without sinks the two policies are one."""
        return self.policy == "streaming" and self.sinks > 0


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
    if a.policy == "streaming":
        assert shift_cos is not None, "the streaming policy needs the shift angles"
        assert shift_sin is not None, "the streaming policy needs the shift angles"
        sink_query = rotate(query, shift_cos, shift_sin, a.interleaved)
    attended = np.zeros_like(query)
    for b in range(batch):
        for t in range(tokens):
            slots = attended_slots(a, int(position[b]) + t, int(write_index[b]) + t)
            for h in range(heads):
                scores = np.array([(sink_query if j < a.sinks else query)[b, h, t] @ keys[b, h // groups, j] * a.scale for j in slots])
                weights = np.exp(scores - scores.max())
                attended[b, h, t] = (weights / weights.sum()) @ values[b, h // groups, slots]
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
