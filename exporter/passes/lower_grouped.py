"""RingAttention -> TensorScatter + grouped MatMul, Softmax, MatMul: the form for ONNX Runtime on a CPU, and for chunks everywhere.

The query heads that share a KV head are rows of one matrix, so each ring is read once and nothing is repeated. The sinks' scores
are computed from the turned-back query directly and take the place of the first S columns.
"""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.lowering import (
    Lowering,
    LowerRingAttention,
    RingNode,
    finish,
    float_constant,
    fold_groups,
    sink_keys,
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
        query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{a.scale}", a.scale))
        scores = into.op("MatMul", fold_groups(into, ring, query), into.op("Transpose", keys, perm=[0, 1, 3, 2]))
        if a.turns_sinks:
            sinks = into.op("MatMul", fold_groups(into, ring, turn_back(into, ring, query)), sink_keys(into, ring, keys))
            recent = into.op("Slice", scores, into.ints(a.sinks), into.ints(a.capacity), into.ints(3))
            scores = into.op("Concat", sinks, recent, axis=3)
        mask = shared.mask(into, ring, additive=True)
        if ring.tokens == 1:
            weights = into.op("Softmax", into.op("Add", scores, mask), axis=-1)
        else:
            # Rows are (head of the group, token): the mask is the same for the heads.
            split = into.op("Reshape", scores, into.ints(ring.batch * ring.groups, ring.heads // ring.groups, -1, a.capacity))
            weights = into.op("Softmax", into.op("Add", split, _per_group(into, ring, mask)), axis=-1)
            weights = into.op("Reshape", weights, into.ints(ring.batch, ring.groups, -1, a.capacity))
        attended = into.op("MatMul", weights, values)
        attended = into.op("Reshape", attended, into.ints(ring.batch, ring.heads, -1, ring.head_size))
        finish(into, ring, attended, keys, values)


def _per_group(into: Insertion, ring: RingNode, mask: ir.Value) -> ir.Value:
    """[B,1,T,C] -> [B*G,1,T,C]; with one row it broadcasts as it is."""
    if ring.batch == 1:
        return mask
    wide = into.op("Expand", mask, into.ints(1, ring.groups, 1, 1))
    return into.op("Reshape", wide, into.ints(ring.batch * ring.groups, 1, -1, ring.attributes.capacity))
