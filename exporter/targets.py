"""Targets as data: which form of each graph a runtime is given. Everything that differs between runtimes is decided here."""

from dataclasses import dataclass

from sinkring.exporter.passes.lower_fused import LowerToFusedAttention
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lower_heads import LowerToHeadAttention
from sinkring.exporter.passes.lowering import LowerRingAttention
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Role, WeightForm


@dataclass(frozen=True)
class Target:
    """What one runtime gets. `attention` maps a graph's role to the pass that lowers RingAttention for it.

    weight_form: how weights of 4 or 8 bits are stored for it (see WeightStorage); None if it runs none.
    """

    name: str
    opset: int
    ir_version: int
    attention: dict[Role, type[LowerRingAttention]]
    weight_form: WeightForm | None = None


# In TensorRT a prefill chunk is products of matrices either way, and the grouped form is the one that it does not repeat K and V for; at
# T = 1 it reads the ring in place only in the fused form. ONNX Runtime has no fused kernel for either on a CPU, and the form by heads is
# the fastest of its own in both (docs/measurements.md).
TARGETS = {
    target.name: target
    for target in (
        Target("onnxruntime", 24, 10, {"decode": LowerToHeadAttention, "prefill": LowerToHeadAttention}, weight_form="blocks"),
        Target("tensorrt-rtx", 24, 10, {"decode": LowerToFusedAttention, "prefill": LowerToGroupedAttention}, weight_form="qdq"),
        # The same files: TensorRT from 10.15 on takes these operators, too.
        Target("tensorrt", 24, 10, {"decode": LowerToFusedAttention, "prefill": LowerToGroupedAttention}, weight_form="qdq"),
    )
}


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise UnsupportedError(f"target {name!r} is not known; known: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]
