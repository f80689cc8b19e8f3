"""RingAttention -> TensorScatter + MatMul, Softmax, MatMul per query head: the form for ONNX Runtime, at T = 1 and in chunks alike.

Each head is a product of its own over a ring that its group shares by broadcasting: at T = 1 a vector times a matrix, for which ONNX
Runtime reads the ring where it lies. For several rows together, as in the grouped form, it first packs a copy of it. The sinks' scores take
the place of the first S columns by one more TensorScatter: one pass over the scores, where cutting and joining them are two.
"""

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
        read = into.op("Transpose", _of_group(into, ring, keys), perm=[0, 1, 2, 4, 3])
        scores = into.op("MatMul", _heads(into, ring, query), read)
        if ring.turns_sinks:
            turned = _heads(into, ring, turn_back(into, ring, query))
            sinks = into.op("MatMul", turned, into.op("Unsqueeze", sink_keys(into, ring, keys), into.ints(2)))
            scores = into.op("TensorScatter", scores, sinks, axis=-1)
        if a.softcap:
            scores = cap(into, ring, scores)
        scores = into.op("Add", scores, _mask(into, shared, ring))
        if ring.has_sink_logits:
            logits = into.op("Reshape", ring.input(9), into.ints(1, ring.groups, ring.heads // ring.groups, 1, 1))
            weights = softmax_beside(into, scores, logits)
        else:
            weights = into.op("Softmax", scores, axis=-1)
        attended = into.op("MatMul", weights, _of_group(into, ring, values))
        attended = into.op("Reshape", attended, into.ints(ring.batch, ring.heads, -1, ring.head_size))
        finish(into, ring, attended, keys, values)


def _heads(into: Insertion, ring: RingNode, query: ir.Value) -> ir.Value:
    """[B,H,T,D] -> [B,G,H/G,T,D]."""
    return into.op("Reshape", query, into.ints(ring.batch, ring.groups, ring.heads // ring.groups, -1, ring.head_size))


def _of_group(into: Insertion, ring: RingNode, updated: ir.Value) -> ir.Value:
    """r [B,G,C,D] -> f [B,G,1,C,D]: one ring for all heads of its group."""
    shape = into.ints(ring.batch, ring.groups, 1, ring.attributes.capacity, ring.head_size)
    return into.op("Reshape", from_cache_type(into, ring, updated), shape)


def _mask(into: Insertion, shared: Lowering, ring: RingNode) -> ir.Value:
    """[B,1,T,C] -> [B,1,1,T,C], and with ALiBi slopes [B,H,T,C] -> [B,G,H/G,T,C]. One mask for one row broadcasts as it is."""
    mask, capacity = shared.additive(into, ring), ring.attributes.capacity
    if ring.attributes.alibi_slopes:
        return into.op("Reshape", mask, into.ints(ring.batch, ring.groups, ring.heads // ring.groups, -1, capacity))
    return mask if ring.batch == 1 else into.op("Unsqueeze", mask, into.ints(1))
