"""RingAttention -> TensorScatter + grouped MatMul, Softmax, MatMul: the form for chunks in TensorRT.

The query heads that share a KV head are rows of one matrix, so each ring is read once and nothing is repeated. The sinks' scores
are computed from the turned-back query directly and take the place of the first S columns. A learned sink logit is one more column of
the softmax, dropped after it.
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
    fold_groups,
    from_cache_type,
    sink_keys,
    softmax_beside,
    turn_back,
    write_rings,
)


class LowerToGroupedAttention(LowerRingAttention):
    """Matrix products and a Softmax per KV head."""

    FORM = "grouped"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        into = Insertion(shared.graph, ring.node)
        a = ring.attributes
        keys, values = write_rings(into, ring)
        # The query is small and the scores are not: scale the query, once for both of its turns.
        scale = a.scale / a.softcap if a.softcap else a.scale
        query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{scale}", scale))
        read = from_cache_type(into, ring, keys)
        scores = into.op("MatMul", fold_groups(into, ring, query), into.op("Transpose", read, perm=[0, 1, 3, 2]))
        if ring.turns_sinks:
            sinks = into.op("MatMul", fold_groups(into, ring, turn_back(into, ring, query)), sink_keys(into, ring, keys))
            recent = into.op("Slice", scores, into.ints(a.sinks), into.ints(a.capacity), into.ints(3))
            scores = into.op("Concat", sinks, recent, axis=3)
        if a.softcap:
            scores = cap(into, ring, scores)
        weights = _weights(into, shared, ring, scores)
        attended = into.op("MatMul", weights, from_cache_type(into, ring, values))
        attended = into.op("Reshape", attended, into.ints(ring.batch, ring.heads, -1, ring.head_size))
        finish(into, ring, attended, keys, values)


def _weights(into: Insertion, shared: Lowering, ring: RingNode, scores: ir.Value) -> ir.Value:
    """[B,G,(H/G)*T,C] -> the same shape: each row's share of the values."""
    mask, capacity = shared.additive(into, ring), ring.attributes.capacity
    if ring.has_sink_logits:
        return _weights_beside_sink_logits(into, ring, scores, mask)
    if ring.tokens == 1:
        if ring.attributes.alibi_slopes:
            mask = into.op("Reshape", mask, into.ints(ring.batch, ring.groups, -1, capacity))
        return into.op("Softmax", into.op("Add", scores, mask), axis=-1)
    # Rows are (head of the group, token): apart, the heads share a mask.
    split = into.op("Reshape", scores, into.ints(ring.batch * ring.groups, ring.heads // ring.groups, -1, capacity))
    weights = into.op("Softmax", into.op("Add", split, mask_per_group(into, ring, mask, capacity)), axis=-1)
    return into.op("Reshape", weights, into.ints(ring.batch, ring.groups, -1, capacity))


def mask_per_group(into: Insertion, ring: RingNode, mask: ir.Value, columns: int) -> ir.Value:
    """[B,1,T,C] -> [B*G,1,T,C], and [B,H,T,C] -> [B*G,H/G,T,C]; one mask for one row broadcasts as it is.

    columns: C, or 0 for as many as there are.
    """
    groups = ring.batch * ring.groups
    if ring.attributes.alibi_slopes:
        return into.op("Reshape", mask, into.ints(groups, ring.heads // ring.groups, -1, columns))
    if ring.batch == 1:
        return mask
    wide = into.op("Expand", mask, into.ints(1, ring.groups, 1, 1))
    return into.op("Reshape", wide, into.ints(groups, 1, -1, columns))


def _weights_beside_sink_logits(into: Insertion, ring: RingNode, scores: ir.Value, mask: ir.Value) -> ir.Value:
    """Heads and tokens are axes of their own, so that the logits of the heads broadcast."""
    batch, groups, per_group, capacity = ring.batch, ring.groups, ring.heads // ring.groups, ring.attributes.capacity
    mask_heads = (groups, per_group) if ring.attributes.alibi_slopes else (1, 1)
    split = into.op("Reshape", scores, into.ints(batch, groups, per_group, -1, capacity))
    split = into.op("Add", split, into.op("Reshape", mask, into.ints(batch, *mask_heads, -1, capacity)))
    weights = softmax_beside(into, split, into.op("Reshape", ring.input(9), into.ints(1, groups, per_group, 1, 1)))
    return into.op("Reshape", weights, into.ints(batch, groups, -1, capacity))
