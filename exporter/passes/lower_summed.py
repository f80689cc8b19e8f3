"""RingAttention at T = 1 -> TensorScatter + products written as Mul and ReduceSum: for what the fused operator lacks, with no ring copied.

TensorRT-RTX 1.7 fuses each of the two products, with the softmax's steps and a cast of float16 caches, into a kernel that reads its ring
where it lies. Around a matrix product it copies the ring: always with a softcap between the two, and in a whole decoder without one too.
ONNX Runtime computes the same from these graphs, slowly: it has the form by heads.
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
    sink_bias,
    softmax_beside,
    write_rings,
)


class LowerToSummedAttention(LowerRingAttention):
    """Requires T = 1 in every node."""

    FORM = "summed"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        if ring.tokens != 1:
            raise ir.passes.PreconditionError(f"{ring.node.name}: T={ring.tokens}, and only one query is attended to in sums; use grouped")
        into = Insertion(shared.graph, ring.node)
        a = ring.attributes
        keys, values = write_rings(into, ring)
        query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{a.scale}", a.scale))
        scores = scores_in_sums(into, ring, query, from_cache_type(into, ring, keys), a.capacity)
        if ring.turns_sinks:
            scores = into.op("Add", scores, sink_bias(into, ring, keys))
        if a.softcap:
            scores = cap(into, ring, into.op("Div", scores, float_constant(into, f"f32.softcap{a.softcap}", a.softcap)))
        scores = into.op("Add", scores, shared.additive(into, ring))
        if ring.has_sink_logits:
            weights = softmax_beside(into, scores, into.op("Reshape", ring.input(9), into.ints(1, ring.heads, 1, 1)))
        else:
            weights = into.op("Softmax", scores, axis=-1)
        attended = attended_in_sums(into, ring, weights, from_cache_type(into, ring, values), a.capacity)
        finish(into, ring, attended, keys, values)


def scores_in_sums(into: Insertion, ring: RingNode, query: ir.Value, keys: ir.Value, columns: int) -> ir.Value:
    """[B,H,1,D], [B,G,C,D] -> [B,H,1,C]. columns: how many keys C are."""
    queries = into.op("Reshape", query, into.ints(ring.batch, ring.groups, -1, 1, ring.head_size))
    products = into.op("Mul", into.op("Unsqueeze", keys, into.ints(2)), queries)
    scores = into.op("ReduceSum", products, into.ints(-1), keepdims=0)
    return into.op("Reshape", scores, into.ints(ring.batch, ring.heads, 1, columns))


def attended_in_sums(into: Insertion, ring: RingNode, weights: ir.Value, values: ir.Value, columns: int) -> ir.Value:
    """[B,H,1,C], [B,G,C,D] -> [B,H,1,D]. columns: how many values C are."""
    shares = into.op("Reshape", weights, into.ints(ring.batch, ring.groups, -1, columns, 1))
    products = into.op("Mul", shares, into.op("Unsqueeze", values, into.ints(2)))
    attended = into.op("ReduceSum", products, into.ints(3), keepdims=0)
    return into.op("Reshape", attended, into.ints(ring.batch, ring.heads, 1, ring.head_size))
