"""RingAttention -> TensorScatter + float16 products: for GPUs whose builder has no product of float32 (Turing).

Queries are scaled before they are rounded, so a score is as large as the softmax sees it: float16 ends at 65,504 and trained scores at some
hundreds. Each score is rounded by up to 2**-11 of itself, as eager PyTorch's are in float16.
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
    turn_back,
    write_rings,
)

HALF = ir.DataType.FLOAT16
# The lowest finite number of float16: less a score it is -inf or as far below all scores of tokens that count, of which each query has one.
LOWEST = -65504.0


class LowerToHalfAttention(LowerRingAttention):
    """Requires float16 caches, and neither a softcap nor learned sink logits.

    At T = 1 it is the fused operator, which reads the ring where it lies; in chunks the heads of a group are rows of one matrix and the
    softmax is float32 by itself.
    """

    FORM = "half"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        a = ring.attributes
        if ring.cache_type != HALF or a.softcap or ring.has_sink_logits:
            raise ir.passes.PreconditionError(
                f"{ring.node.name}: caches are {ring.cache_type}, softcap {a.softcap}, learned sink logits {ring.has_sink_logits}; float16 "
                "products need float16 caches and neither of the others"
            )
        into = Insertion(shared.graph, ring.node)
        keys, values = write_rings(into, ring)
        query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{a.scale}", a.scale))
        weigh = _attend_one if ring.tokens == 1 else _attend_chunk
        attended = into.op("Cast", weigh(into, shared, ring, query, keys, values), to=ring.float_type)
        finish(into, ring, attended, keys, values)


def _attend_one(into: Insertion, shared: Lowering, ring: RingNode, query: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
    """float16 [B,H,1,D]."""
    mask = shared.additive(into, ring)
    if ring.turns_sinks:
        mask = into.op("Add", _sink_bias(into, ring, query, keys), mask)
    low = into.op("Max", mask, float_constant(into, "f32.lowest", LOWEST))
    # A scale of 1.0 makes the builder copy the keys.
    double = into.op("Cast", into.op("Mul", query, float_constant(into, "f32.two", 2.0)), to=HALF)
    return into.op("Attention", double, keys, values, into.op("Cast", low, to=HALF), scale=0.5)


def _attend_chunk(into: Insertion, shared: Lowering, ring: RingNode, query: ir.Value, keys: ir.Value, values: ir.Value) -> ir.Value:
    """float16 [B,H,T,D]."""
    a = ring.attributes
    rows = into.op("Cast", fold_groups(into, ring, query), to=HALF)
    scores = into.op("Cast", into.op("MatMul", rows, into.op("Transpose", keys, perm=[0, 1, 3, 2])), to=ir.DataType.FLOAT)
    scores = into.op("Reshape", scores, into.ints(ring.batch, ring.heads, -1, a.capacity))
    mask = shared.additive(into, ring)
    if ring.turns_sinks:
        mask = into.op("Add", _sink_bias(into, ring, query, keys), mask)
    weights = into.op("Softmax", into.op("Add", scores, mask), axis=-1)
    folded = into.op("Reshape", into.op("Cast", weights, to=HALF), into.ints(ring.batch, ring.groups, -1, a.capacity))
    return into.op("Reshape", into.op("MatMul", folded, values), into.ints(ring.batch, ring.heads, -1, ring.head_size))


def _sink_bias(into: Insertion, ring: RingNode, query: ir.Value, keys: ir.Value) -> ir.Value:
    """float32 [B,H,T,C]: see `lowering.sink_bias`; the difference of the two queries is taken before it is rounded."""
    a = ring.attributes
    turned = into.op("Cast", into.op("Sub", turn_back(into, ring, query), query), to=HALF)
    sinks = into.op("Slice", keys, into.ints(0), into.ints(a.sinks), into.ints(2))
    bias = into.op("MatMul", fold_groups(into, ring, turned), into.op("Transpose", sinks, perm=[0, 1, 3, 2]))
    bias = into.op("Cast", into.op("Reshape", bias, into.ints(ring.batch, ring.heads, -1, a.sinks)), to=ir.DataType.FLOAT)
    return into.op("Pad", bias, into.ints(0, 0, 0, 0, 0, 0, 0, a.slots))
