"""RingAttention -> a graph that only reads the rings and gives out the new rows, which the runtime writes into their slots afterwards.

For runtimes that cannot update an input in place (TensorRT 10.3). A query attends to the ring as it was before the call, without the slots
that are about to be replaced, and to the T new rows: two products, whose scores stand side by side in one softmax, and two products with
the values, added. Nothing as large as a ring is put together. At T = 1 the products are sums, which TensorRT reads a ring in place for
(see lower_summed); a chunk's are matrix products per KV head (see lower_grouped). Operators are those of opset 20, but for
RotaryEmbedding.
"""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.lower_grouped import mask_per_group
from sinkring.exporter.passes.lower_summed import attended_in_sums, scores_in_sums
from sinkring.exporter.passes.lowering import (
    Lowering,
    LowerRingAttention,
    RingNode,
    cap,
    finish_with_rows,
    float_constant,
    fold_groups,
    from_cache_type,
    new_rows,
    sink_bias,
    sink_keys,
    softmax_beside,
    turn_back,
)

_TO_THE_END = (1 << 63) - 1


class LowerToAppendedAttention(LowerRingAttention):
    """Ensures that no ring is written: the outputs are the rows to write (see rows_name)."""

    FORM = "appended"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        into = Insertion(shared.graph, ring.node)
        rows = new_rows(into, ring)
        attend = _attend_one if ring.tokens == 1 else _attend_chunk
        finish_with_rows(into, ring, attend(into, shared, ring, rows), rows)


def _attend_one(into: Insertion, shared: Lowering, ring: RingNode, rows: tuple[ir.Value, ir.Value]) -> ir.Value:
    """[B,H,1,D]. The one new row is the query's own: never masked, at distance 0, and so under either policy."""
    a, keys, values = ring.attributes, ring.input(3), ring.input(4)
    query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{a.scale}", a.scale))
    old = scores_in_sums(into, ring, query, from_cache_type(into, ring, keys), a.capacity)
    new = scores_in_sums(into, ring, query, from_cache_type(into, ring, rows[0]), 1)
    if ring.turns_sinks:
        old = into.op("Add", old, sink_bias(into, ring, keys))
    if a.softcap:
        softcap = float_constant(into, f"f32.softcap{a.softcap}", a.softcap)
        old, new = (cap(into, ring, into.op("Div", scores, softcap)) for scores in (old, new))
    scores = into.op("Concat", into.op("Add", old, shared.additive_before(into, ring)), new, axis=3)
    if ring.has_sink_logits:
        weights = softmax_beside(into, scores, into.op("Reshape", ring.input(9), into.ints(1, ring.heads, 1, 1)))
    else:
        weights = into.op("Softmax", scores, axis=-1)
    of_old, of_new = _apart(into, ring, weights)
    return into.op(
        "Add",
        attended_in_sums(into, ring, of_old, from_cache_type(into, ring, values), a.capacity),
        attended_in_sums(into, ring, of_new, from_cache_type(into, ring, rows[1]), 1),
    )


def _attend_chunk(into: Insertion, shared: Lowering, ring: RingNode, rows: tuple[ir.Value, ir.Value]) -> ir.Value:
    """[B,H,T,D]."""
    a, keys, values = ring.attributes, ring.input(3), ring.input(4)
    # The query is small and the scores are not: scale the query, once for both of its turns.
    scale = a.scale / a.softcap if a.softcap else a.scale
    query = into.op("Mul", ring.input(0), float_constant(into, f"f32.scale{scale}", scale))
    query.shape, query.type = ring.input(0).shape, ring.input(0).type
    folded = fold_groups(into, ring, query)
    new_keys = into.op("Transpose", from_cache_type(into, ring, rows[0]), perm=[0, 1, 3, 2])
    old = into.op("MatMul", folded, into.op("Transpose", from_cache_type(into, ring, keys), perm=[0, 1, 3, 2]))
    new = into.op("MatMul", folded, new_keys)
    if ring.turns_sinks:
        turned = fold_groups(into, ring, turn_back(into, ring, query))
        recent = into.op("Slice", old, into.ints(a.sinks), into.ints(a.capacity), into.ints(3))
        old = into.op("Concat", into.op("MatMul", turned, sink_keys(into, ring, keys)), recent, axis=3)
        # A sink may be among the new rows, and further back than the window for the last queries of the same chunk.
        is_sink = shared.new_rows(into, ring).sink
        assert is_sink is not None, "a node that turns its sinks has some"
        new = into.op("Where", is_sink, into.op("MatMul", turned, new_keys), new)
    scores = into.op("Concat", old, new, axis=3)
    if a.softcap:
        scores = cap(into, ring, scores)
    of_old, of_new = _apart(into, ring, _weights(into, shared, ring, scores))
    attended = into.op(
        "Add",
        into.op("MatMul", of_old, from_cache_type(into, ring, values)),
        into.op("MatMul", of_new, from_cache_type(into, ring, rows[1])),
    )
    return into.op("Reshape", attended, into.ints(ring.batch, ring.heads, -1, ring.head_size))


def _weights(into: Insertion, shared: Lowering, ring: RingNode, scores: ir.Value) -> ir.Value:
    """[B,G,(H/G)*T,C+T] -> the same shape: each row's share of the values. In a Reshape 0 stands for the columns, as many as there are."""
    groups, per_head = ring.batch * ring.groups, ring.heads // ring.groups
    split = into.op("Reshape", scores, into.ints(groups, per_head, -1, 0))
    split = into.op("Add", split, mask_per_group(into, ring, shared.additive_with_new(into, ring), 0))
    sinks = ring.has_sink_logits
    weights = softmax_beside(into, split, _logits_per_group(into, ring)) if sinks else into.op("Softmax", split, axis=-1)
    return into.op("Reshape", weights, into.ints(ring.batch, ring.groups, -1, 0))


def _logits_per_group(into: Insertion, ring: RingNode) -> ir.Value:
    """[H] -> [B*G,H/G,1,1]."""
    per_head = ring.heads // ring.groups
    logits = into.op("Reshape", ring.input(9), into.ints(1, ring.groups, per_head, 1))
    if ring.batch > 1:
        logits = into.op("Expand", logits, into.ints(ring.batch, 1, 1, 1))
    return into.op("Reshape", logits, into.ints(ring.batch * ring.groups, per_head, 1, 1))


def _apart(into: Insertion, ring: RingNode, weights: ir.Value) -> tuple[ir.Value, ir.Value]:
    """[...,C+T] -> [...,C] and [...,T]."""
    capacity = ring.attributes.capacity
    return (
        into.op("Slice", weights, into.ints(0), into.ints(capacity), into.ints(3)),
        into.op("Slice", weights, into.ints(capacity), into.ints(_TO_THE_END), into.ints(3)),
    )
