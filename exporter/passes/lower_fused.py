"""RingAttention -> TensorScatter + Attention (opset 24): the form that TensorRT fuses, and that ONNX Runtime runs as it is.

Under the streaming policy the fused operator takes one query, so the sinks' scores are mended through its mask: the bias
scale * (q_sink - q) . k_sink is added on the S sink columns.
"""

import numpy as np
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


class LowerToFusedAttention(LowerRingAttention):
    """One TensorScatter for each ring and one Attention of opset 24 for each layer."""

    FORM = "fused"

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        into = Insertion(shared.graph, ring.node)
        query, scale = ring.input(0), ring.attributes.scale
        if scale == 1.0:
            # TensorRT copies the whole key cache at scale 1.0 and at no other.
            query, scale = into.op("Mul", query, float_constant(into, "f32.two", 2.0)), 0.5
        keys, values = write_rings(into, ring)
        turned = ring.attributes.turns_sinks
        mask = _biased_mask(into, shared, ring, keys) if turned else shared.mask(into, ring, additive=ring.tokens != 1)
        attended = into.op("Attention", query, keys, values, mask, scale=scale)
        finish(into, ring, attended, keys, values)


def _biased_mask(into: Insertion, shared: Lowering, ring: RingNode, keys: ir.Value) -> ir.Value:
    """[B,H,T,C]: the additive mask with the sinks' bias on its first S columns."""
    a = ring.attributes
    mask = shared.mask(into, ring, additive=True)
    turned = into.op("Sub", turn_back(into, ring, ring.input(0)), ring.input(0))
    bias = into.op("MatMul", fold_groups(into, ring, turned), sink_keys(into, ring, keys))
    bias = into.op("Mul", bias, float_constant(into, f"f32.scale{a.scale}", a.scale))
    bias = into.op("Reshape", bias, into.ints(ring.batch, ring.heads, -1, a.sinks))
    pads = into.constant(f"pads{a.slots}", np.array([0, 0, 0, 0, 0, 0, 0, a.slots], dtype=np.int64))
    return into.op("Add", into.op("Pad", bias, pads), mask)
