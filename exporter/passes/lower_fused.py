"""RingAttention -> TensorScatter + Attention (opset 24): the form that TensorRT fuses, and that ONNX Runtime runs as it is.

Under the streaming policy the fused operator takes one query, so the sinks' scores are mended through its mask: the bias
scale * (q_sink - q) . k_sink is added on the S sink columns.
"""

import numpy as np
import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lowering import (
    Lowering,
    LowerRingAttention,
    RingNode,
    finish,
    float_constant,
    fold_groups,
    from_cache_type,
    sink_keys,
    to_cache_type,
    turn_back,
    write_rings,
)
from sinkring.exporter.passes.ring_mask import write_narrowed


class LowerToFusedAttention(LowerRingAttention):
    """One TensorScatter for each ring and one Attention of opset 24 for each layer that it can express; the others are grouped."""

    FORM = "fused"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        if not _expressible(ring):
            LowerToGroupedAttention().lower(shared, ring)
            return
        into = Insertion(shared.graph, ring.node)
        query, scale = ring.input(0), ring.attributes.scale
        if scale == 1.0:
            # TensorRT copies the whole key cache at scale 1.0 and at no other.
            query, scale = into.op("Mul", query, float_constant(into, "f32.two", 2.0)), 0.5
        keys, values = write_rings(into, ring)
        query = to_cache_type(into, ring, query)
        attended = into.op("Attention", query, keys, values, _mask(into, shared, ring, keys), scale=scale)
        finish(into, ring, from_cache_type(into, ring, attended), keys, values)


def _expressible(ring: RingNode) -> bool:
    """TensorRT refuses a softcap on Attention, and the operator has no column of the softmax without a key."""
    return not ring.attributes.softcap and not ring.has_sink_logits


def _mask(into: Insertion, shared: Lowering, ring: RingNode, keys: ir.Value) -> ir.Value:
    """bool [B,1,T,C], the best kind at T = 1, or additive [B,H,T,C] (one H for all heads where they agree) in the type of the caches."""
    if ring.turns_sinks:
        return write_narrowed(into, _biased_mask(into, shared, ring, keys), ring.cache_type)
    if ring.tokens == 1 and not ring.attributes.alibi_slopes:
        return shared.validity(into, ring)
    return shared.narrowed(into, ring)


def _biased_mask(into: Insertion, shared: Lowering, ring: RingNode, keys: ir.Value) -> ir.Value:
    """float32 [B,H,T,C]: the additive mask with the sinks' bias on its first S columns."""
    a = ring.attributes
    mask = shared.additive(into, ring)
    # The bias takes away what the operator will compute for a sink, so it must start from the query that the operator gets: rounded.
    rounded = from_cache_type(into, ring, to_cache_type(into, ring, ring.input(0)))
    turned = into.op("Sub", turn_back(into, ring, ring.input(0)), rounded)
    bias = into.op("MatMul", fold_groups(into, ring, turned), sink_keys(into, ring, keys))
    bias = into.op("Mul", bias, float_constant(into, f"f32.scale{a.scale}", a.scale))
    bias = into.op("Reshape", bias, into.ints(ring.batch, ring.heads, -1, a.sinks))
    pads = into.constant(f"pads{a.slots}", np.array([0, 0, 0, 0, 0, 0, 0, a.slots], dtype=np.int64))
    return into.op("Add", into.op("Pad", bias, pads), mask)
