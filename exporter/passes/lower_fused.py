"""RingAttention -> TensorScatter + Attention (opset 24): the form that TensorRT fuses, and that ONNX Runtime runs as it is.

Under the streaming policy the fused operator takes one query, so the sinks' scores are mended through its mask: the bias
scale * (q_sink - q) . k_sink is added on the S sink columns.
"""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lower_summed import LowerToSummedAttention
from sinkring.exporter.passes.lowering import (
    Lowering,
    LowerRingAttention,
    RingNode,
    finish,
    float_constant,
    from_cache_type,
    sink_bias,
    write_rings,
)


class LowerToFusedAttention(LowerRingAttention):
    """One TensorScatter for each ring and one Attention of opset 24 for each layer that it can express.

    The others are summed at T = 1, grouped in chunks.
    """

    FORM = "fused"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        if not _expressible(ring):
            other = LowerToSummedAttention() if ring.tokens == 1 else LowerToGroupedAttention()
            other.lower(shared, ring)
            return
        into = Insertion(shared.graph, ring.node)
        query, scale = ring.input(0), ring.attributes.scale
        if scale == 1.0:
            # TensorRT copies the whole key cache at scale 1.0 and at no other.
            query, scale = into.op("Mul", query, float_constant(into, "f32.two", 2.0)), 0.5
        keys, values = write_rings(into, ring)
        # A cast of a ring costs nothing: TensorRT's kernel reads float16 where it lies and computes in float32.
        read = (from_cache_type(into, ring, cache) for cache in (keys, values))
        attended = into.op("Attention", query, *read, _mask(into, shared, ring, keys), scale=scale)
        finish(into, ring, attended, keys, values)


def _expressible(ring: RingNode) -> bool:
    """TensorRT refuses a softcap on Attention, and the operator has no column of the softmax without a key."""
    return not ring.attributes.softcap and not ring.has_sink_logits


def _mask(into: Insertion, shared: Lowering, ring: RingNode, keys: ir.Value) -> ir.Value:
    """bool [B,1,T,C], the best kind at T = 1, or additive [B,H,T,C], with one H for all heads where they agree."""
    if ring.turns_sinks:
        mask = shared.additive(into, ring)
        return into.op("Add", sink_bias(into, ring, keys), mask)
    if ring.tokens == 1 and not ring.attributes.alibi_slopes:
        return shared.validity(into, ring)
    return shared.additive(into, ring)
