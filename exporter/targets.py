"""Targets as data: which form of each graph a runtime is given. Everything that differs between runtimes is decided here."""

from dataclasses import dataclass

from sinkring.exporter.passes.lower_fused import LowerToFusedAttention
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Role


@dataclass(frozen=True)
class Target:
    """What one runtime gets. `attention` maps a graph's role to the pass that lowers RingAttention for it."""

    name: str
    opset: int
    ir_version: int
    attention: dict[Role, type[LowerToFusedAttention] | type[LowerToGroupedAttention]]


# A prefill chunk is products of matrices either way, and the grouped form is the one that neither runtime repeats K and V for.
# At T = 1 TensorRT reads the ring in place only in the fused form; ONNX Runtime on a CPU is two to three times faster in the grouped.
TARGETS = {
    target.name: target
    for target in (
        Target("onnxruntime", 24, 10, {"decode": LowerToGroupedAttention, "prefill": LowerToGroupedAttention}),
        Target("tensorrt-rtx", 24, 10, {"decode": LowerToFusedAttention, "prefill": LowerToGroupedAttention}),
    )
}


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise UnsupportedError(f"target {name!r} is not known; known: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]
