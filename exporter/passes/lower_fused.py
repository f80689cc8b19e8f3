"""RingAttention -> TensorScatter + Attention (opset 24): the form that TensorRT fuses, and that ONNX Runtime runs as it is.

Under the streaming policy the fused operator takes one query, so the sinks' scores are mended through its mask: the bias
scale * (q_sink - q) . k_sink is added on the S sink columns.
"""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.lower_by_head import LowerToAttentionByHead
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lowering import (
    Lowering,
    LowerRingAttention,
    RingNode,
    finish,
    float_constant,
    sink_bias,
    write_rings,
)


class LowerToFusedAttention(LowerRingAttention):
    """One TensorScatter for each ring and one Attention of opset 24 for each layer that it can express.

    The others go by head at T = 1, grouped in chunks.
    """

    FORM = "fused"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        if not _expressible(ring):
            other = LowerToAttentionByHead() if ring.tokens == 1 else LowerToGroupedAttention()
            other.lower(shared, ring)
            return
        into = Insertion(shared.graph, ring.node)
        query, scale = ring.input(0), ring.attributes.scale
        if scale == 1.0:
            # TensorRT copies the whole key cache at scale 1.0 and at no other.
            query, scale = into.op("Mul", query, float_constant(into, "f32.two", 2.0)), 0.5
        keys, values = write_rings(into, ring)
        attended = into.op("Attention", query, keys, values, _mask(into, shared, ring, keys), scale=scale)
        finish(into, ring, attended, keys, values)


def _expressible(ring: RingNode) -> bool:
    """The operator has no column of the softmax without a key; TensorRT refuses its softcap; and it takes one float type for all, so that
    it would round query, mask and result to a narrower one of the caches, and the sinks' bias with them."""
    return not ring.attributes.softcap and not ring.has_sink_logits and ring.cache_type == ring.float_type


def _mask(into: Insertion, shared: Lowering, ring: RingNode, keys: ir.Value) -> ir.Value:
    """bool [B,1,T,C], the best kind at T = 1, or additive [B,H,T,C], with one H for all heads where they agree."""
    if ring.turns_sinks:
        mask = shared.additive(into, ring)
        return into.op("Add", sink_bias(into, ring, keys), mask)
    if ring.tokens == 1 and not ring.attributes.alibi_slopes:
        return shared.validity(into, ring)
    return shared.additive(into, ring)
