"""RingAttention at T = 1 -> TensorScatter + attention head by head: for what the fused operator lacks, with the rings still read in place.

Written with each KV head repeated for its query heads, which a compiler sees through: TensorRT-RTX 1.7 makes one fused kernel of the two
products and the softmax, learned sink logits included, and reads float16 caches for float32 arithmetic. A softcap between them it does
not see through, and copies a ring for each product; the products are therefore written as Mul and ReduceSum, one kernel each, which reads
its ring where it lies.
ONNX Runtime computes the same from these graphs, slowly: it has the grouped form.
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


class LowerToAttentionByHead(LowerRingAttention):
    """Requires T = 1 in every node."""

    FORM = "by_head"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        if ring.tokens != 1:
            raise ir.passes.PreconditionError(f"{ring.node.name}: T={ring.tokens}, and only one query is attended to by head; use grouped")
        into = Insertion(shared.graph, ring.node)
        a = ring.attributes
        written_keys, written_values = write_rings(into, ring)
        keys, values = from_cache_type(into, ring, written_keys), from_cache_type(into, ring, written_values)
        query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{a.scale}", a.scale))
        scores = _sum_of_products(into, ring, query, keys) if a.softcap else _product(into, ring, query, keys)
        if ring.turns_sinks:
            scores = into.op("Add", scores, sink_bias(into, ring, written_keys))
        if a.softcap:
            scores = cap(into, ring, into.op("Div", scores, float_constant(into, f"f32.softcap{a.softcap}", a.softcap)))
        scores = into.op("Add", scores, shared.additive(into, ring))
        if ring.has_sink_logits:
            weights = softmax_beside(into, scores, into.op("Reshape", ring.input(9), into.ints(1, ring.heads, 1, 1)))
        else:
            weights = into.op("Softmax", scores, axis=-1)
        attended = _sum_of_shares(into, ring, weights, values) if a.softcap else into.op("MatMul", weights, _repeat(into, ring, values))
        finish(into, ring, attended, written_keys, written_values)


def _product(into: Insertion, ring: RingNode, query: ir.Value, keys: ir.Value) -> ir.Value:
    """[B,H,1,D], [B,G,C,D] -> [B,H,1,C]."""
    return into.op("MatMul", query, into.op("Transpose", _repeat(into, ring, keys), perm=[0, 1, 3, 2]))


def _repeat(into: Insertion, ring: RingNode, cache: ir.Value) -> ir.Value:
    """[B,G,C,D] -> [B,H,C,D]: the KV head of each query head."""
    batch, groups, capacity, size = ring.batch, ring.groups, ring.attributes.capacity, ring.head_size
    wide = into.op("Unsqueeze", cache, into.ints(2))
    wide = into.op("Expand", wide, into.ints(batch, groups, ring.heads // groups, capacity, size))
    return into.op("Reshape", wide, into.ints(batch, ring.heads, capacity, size))


def _sum_of_products(into: Insertion, ring: RingNode, query: ir.Value, keys: ir.Value) -> ir.Value:
    """[B,H,1,D], [B,G,C,D] -> [B,H,1,C]."""
    queries = into.op("Reshape", query, into.ints(ring.batch, ring.groups, -1, 1, ring.head_size))
    products = into.op("Mul", into.op("Unsqueeze", keys, into.ints(2)), queries)
    scores = into.op("ReduceSum", products, into.ints(-1), keepdims=0)
    return into.op("Reshape", scores, into.ints(ring.batch, ring.heads, 1, ring.attributes.capacity))


def _sum_of_shares(into: Insertion, ring: RingNode, weights: ir.Value, values: ir.Value) -> ir.Value:
    """[B,H,1,C], [B,G,C,D] -> [B,H,1,D]."""
    shares = into.op("Reshape", weights, into.ints(ring.batch, ring.groups, -1, ring.attributes.capacity, 1))
    products = into.op("Mul", shares, into.op("Unsqueeze", values, into.ints(2)))
    attended = into.op("ReduceSum", products, into.ints(3), keepdims=0)
    return into.op("Reshape", attended, into.ints(ring.batch, ring.heads, 1, ring.head_size))
