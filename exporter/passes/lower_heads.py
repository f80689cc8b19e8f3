"""RingAttention -> TensorScatter + MatMul, Softmax, MatMul per query head: the form for ONNX Runtime, at T = 1 and in chunks alike.

Each head is a product of its own over a ring that its group shares by broadcasting: at T = 1 a vector times a matrix, for which ONNX
Runtime reads the ring where it lies. For several rows together, as in the grouped form, it first packs a copy of it. The sinks' scores take
the place of the first S columns by one more TensorScatter: one pass over the scores, where cutting and joining them are two.

A graph for chunks reads no more of a ring than has been reached, as long as no query is so far on that it needs the whole, or meets the
sinks turned back: while a prompt is read, half of it on average, and as plain attention, for which ONNX Runtime has an operator. The part
is a copy, so a full ring is read where it lies. The decode graph, whose rows are of all ages, always reads all of it.
"""

from functools import partial

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
        query = _scaled(into, ring)
        whole = partial(_attend, ring=ring, query=query, keys=keys, values=values, mask=shared.additive(into, ring))
        if ring.tokens is None:
            reached, part = shared.reached(into, ring), shared.additive_reached(into, ring)
            # What is reached of a full ring is C, whatever S + W is.
            last = min(a.sinks + a.window, a.capacity - 1) if ring.turns_sinks else a.capacity - 1
            filling = into.op("LessOrEqual", reached, into.ints(last))
            plain = partial(_attend_plainly, ring=ring, query=query, keys=keys, values=values, mask=part, reached=reached)
            attended = into.either(filling, filling_ring=plain, full_ring=whole)
        else:
            attended = whole(into)
        finish(into, ring, attended, keys, values)


def _attend(
    into: Insertion,
    *,
    ring: RingNode,
    query: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    mask: ir.Value,
    reached: ir.Value | None = None,
) -> ir.Value:
    """[B,H,T,D], of the first F slots that `reached` [1] says, whose sinks need no query of their own, or of all C.

    query: scaled. mask: to be added to the scores, f [B,1 or H,T,F].
    """
    a = ring.attributes
    of_group = _of_group(into, ring, keys, reached)

    def scores_of(some_query: ir.Value, some_keys: ir.Value) -> ir.Value:
        # Turned right in front of the product, the keys' turn is part of it for ONNX Runtime.
        return into.op("MatMul", _heads(into, ring, some_query), into.op("Transpose", some_keys, perm=[0, 1, 2, 4, 3]))

    scores = scores_of(query, of_group)
    if ring.turns_sinks and reached is None:
        sinks = into.op("Slice", of_group, into.ints(0), into.ints(a.sinks), into.ints(3))
        scores = into.op("TensorScatter", scores, scores_of(turn_back(into, ring, query), sinks), axis=-1)
    if a.softcap:
        scores = cap(into, ring, scores)
    scores = into.op("Add", scores, _mask(into, ring, mask))
    if ring.has_sink_logits:
        logits = into.op("Reshape", ring.input(9), into.ints(1, ring.groups, ring.heads // ring.groups, 1, 1))
        weights = softmax_beside(into, scores, logits)
    else:
        weights = into.op("Softmax", scores, axis=-1)
    attended = into.op("MatMul", weights, _of_group(into, ring, values, reached))
    return into.op("Reshape", attended, into.ints(ring.batch, ring.heads, -1, ring.head_size))


def _attend_plainly(
    into: Insertion, *, ring: RingNode, query: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value, reached: ir.Value
) -> ir.Value:
    """As `_attend` of what is reached, by the operator where that knows all that the node asks for."""
    if ring.attributes.softcap or ring.has_sink_logits:
        return _attend(into, ring=ring, query=query, keys=keys, values=values, mask=mask, reached=reached)
    parts = (_part(into, ring, updated, reached) for updated in (keys, values))
    return into.op("Attention", query, *parts, mask, scale=1.0)


def _scaled(into: Insertion, ring: RingNode) -> ir.Value:
    """[B,H,T,D]: the query times the scale of the scores, and with a softcap divided by that.

    In front of the heads' Reshape, so that it stays a node: ONNX Runtime would make it a factor of the product, and with one it has no
    product of a vector with a matrix where that lies, but packs a copy of each ring.
    """
    a = ring.attributes
    scale = a.scale / a.softcap if a.softcap else a.scale
    return into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{scale}", scale))


def _heads(into: Insertion, ring: RingNode, query: ir.Value) -> ir.Value:
    """[B,H,T,D] -> [B,G,H/G,T,D]."""
    return into.op("Reshape", query, into.ints(ring.batch, ring.groups, ring.heads // ring.groups, -1, ring.head_size))


def _of_group(into: Insertion, ring: RingNode, updated: ir.Value, reached: ir.Value | None) -> ir.Value:
    """r [B,G,C,D] -> f [B,G,1,F,D]: one ring for all heads of its group, its first slots or all of them."""
    part = from_cache_type(into, ring, updated) if reached is None else _part(into, ring, updated, reached)
    return into.op("Unsqueeze", part, into.ints(2))


def _part(into: Insertion, ring: RingNode, updated: ir.Value, reached: ir.Value) -> ir.Value:
    """r [B,G,C,D] -> f [B,G,F,D]: the first slots of a ring."""
    return from_cache_type(into, ring, into.op("Slice", updated, into.ints(0), reached, into.ints(2)))


def _mask(into: Insertion, ring: RingNode, additive: ir.Value) -> ir.Value:
    """[B,1,T,F] -> [B,1,1,T,F], and with ALiBi slopes [B,H,T,F] -> [B,G,H/G,T,F]. One mask for one row broadcasts as it is."""
    if ring.attributes.alibi_slopes:
        # 0 keeps a length as it is.
        shape = into.ints(ring.batch, ring.groups, ring.heads // ring.groups, 0, 0)
        return into.op("Reshape", into.op("Unsqueeze", additive, into.ints(2)), shape)
    return additive if ring.batch == 1 else into.op("Unsqueeze", additive, into.ints(1))
