"""RingAttention -> TensorScatter + MatMul, Softmax, MatMul per query head: the form for ONNX Runtime, at T = 1 and in chunks alike.

Each head is a product of its own over a ring that its group shares by broadcasting: at T = 1 a vector times a matrix, for which ONNX
Runtime reads the ring where it lies. For several rows together, as in the grouped form, it first packs a copy of it. The sinks' scores take
the place of the first S columns by one more TensorScatter: one pass over the scores, where cutting and joining them are two.

A graph for chunks reads no more of a ring than has been reached, as long as that is not the whole: while a prompt is read, half of it on
average. The part is a copy, so a full ring is read where it lies. The decode graph, whose rows are of all ages, always reads all of it.
"""

from functools import partial

import numpy as np
import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.lowering import (
    Lowering,
    LowerRingAttention,
    RingNode,
    cap,
    finish,
    float_constant,
    from_cache_type,
    sink_keys,
    softmax_beside,
    turn_back,
    write_rings,
)


class LowerToHeadAttention(LowerRingAttention):
    """Matrix products and a Softmax per query head, over [B,G,H/G,T,C]."""

    FORM = "heads"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        into = Insertion(shared.graph, ring.node)
        a = ring.attributes
        keys, values = write_rings(into, ring)
        # The query is small and the scores are not: scale the query, once for both of its turns.
        scale = a.scale / a.softcap if a.softcap else a.scale
        query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{scale}", scale))
        sinks = None
        if ring.turns_sinks:
            turned = _heads(into, ring, turn_back(into, ring, query))
            sinks = into.op("MatMul", turned, into.op("Unsqueeze", sink_keys(into, ring, keys), into.ints(2)))
        whole = partial(_attend, ring=ring, query=_heads(into, ring, query), sinks=sinks, keys=keys, values=values)
        mask = _mask(into, ring, shared.additive(into, ring))
        if ring.tokens is None:
            reached = shared.reached(into, ring)
            filling = into.op("Less", reached, into.constant(f"i64.{a.capacity}", np.array(a.capacity, np.int64)))
            part = partial(whole, mask=_mask(into, ring, shared.additive_reached(into, ring)), reached=reached)
            attended = into.either(filling, filling_ring=part, full_ring=partial(whole, mask=mask))
        else:
            attended = whole(into, mask=mask)
        attended = into.op("Reshape", attended, into.ints(ring.batch, ring.heads, -1, ring.head_size))
        finish(into, ring, attended, keys, values)


def _attend(
    into: Insertion,
    *,
    ring: RingNode,
    query: ir.Value,
    sinks: ir.Value | None,
    keys: ir.Value,
    values: ir.Value,
    mask: ir.Value,
    reached: ir.Value | None = None,
) -> ir.Value:
    """[B,G,H/G,T,D], of the first F slots that `reached` [1] says, or of all C.

    query: [B,G,H/G,T,D], scaled; sinks: their scores [B,G,H/G,T,S], where they are met by another query; mask: to be added to the scores.
    """
    scores = into.op("MatMul", query, into.op("Transpose", _of_group(into, ring, keys, reached), perm=[0, 1, 2, 4, 3]))
    if sinks is not None:
        scores = into.op("TensorScatter", scores, sinks, axis=-1)
    if ring.attributes.softcap:
        scores = cap(into, ring, scores)
    scores = into.op("Add", scores, mask)
    if ring.has_sink_logits:
        logits = into.op("Reshape", ring.input(9), into.ints(1, ring.groups, ring.heads // ring.groups, 1, 1))
        weights = softmax_beside(into, scores, logits)
    else:
        weights = into.op("Softmax", scores, axis=-1)
    return into.op("MatMul", weights, _of_group(into, ring, values, reached))


def _heads(into: Insertion, ring: RingNode, query: ir.Value) -> ir.Value:
    """[B,H,T,D] -> [B,G,H/G,T,D]."""
    return into.op("Reshape", query, into.ints(ring.batch, ring.groups, ring.heads // ring.groups, -1, ring.head_size))


def _of_group(into: Insertion, ring: RingNode, updated: ir.Value, reached: ir.Value | None) -> ir.Value:
    """r [B,G,C,D] -> f [B,G,1,F,D]: one ring for all heads of its group, its first slots or all of them."""
    if reached is not None:
        updated = into.op("Slice", updated, into.ints(0), reached, into.ints(2))
    return into.op("Unsqueeze", from_cache_type(into, ring, updated), into.ints(2))


def _mask(into: Insertion, ring: RingNode, additive: ir.Value) -> ir.Value:
    """[B,1,T,F] -> [B,1,1,T,F], and with ALiBi slopes [B,H,T,F] -> [B,G,H/G,T,F]. One mask for one row broadcasts as it is."""
    if ring.attributes.alibi_slopes:
        # 0 keeps a length as it is.
        shape = into.ints(ring.batch, ring.groups, ring.heads // ring.groups, 0, 0)
        return into.op("Reshape", into.op("Unsqueeze", additive, into.ints(2)), shape)
    return additive if ring.batch == 1 else into.op("Unsqueeze", additive, into.ints(1))
