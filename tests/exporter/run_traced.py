"""Runs a step graph that still holds RingAttention nodes: onnx's reference evaluator, with the node's own reference in numpy for them.

So the front end and the clean-up are proven alone, without any lowering.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from sinkring.exporter.cache_plan import write_index_name
from sinkring.exporter.frontend import LOGITS, POSITION, ROWS, TOKENS
from sinkring.exporter.node import DOMAIN, OP_TYPE, RingAttentionAttributes, ring_attention
from sinkring.runtime.ring import RingGeometry


class _RingAttention(OpRun):
    op_domain = DOMAIN

    def _run(  # type: ignore[no-untyped-def]  # the evaluator passes attributes by their names
        self, *inputs, sinks=None, window=None, slots=None, scale=None, interleaved=None, policy=None, softcap=None, alibi_slopes=None
    ):
        kinds = (policy, bool(interleaved), softcap or 0.0, tuple(() if alibi_slopes is None else alibi_slopes))
        return ring_attention(RingAttentionAttributes(sinks, window, slots, scale, *kinds), *inputs)


_RingAttention.__name__ = OP_TYPE


@dataclass
class TracedStep:
    """A traced graph with its rings. `feed` runs one call on every row: tokens int64 [B,T] from position on."""

    model: ir.Model
    geometry: RingGeometry
    rings: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._evaluator: Any = ReferenceEvaluator(ir.to_proto(self.model), new_ops=[_RingAttention])
        self.rings = zero_rings(self.model)

    def feed(self, tokens: np.ndarray, positions: list[int], rows: list[int] | None = None) -> np.ndarray:
        """float32 [B,N,V]: logits of the tokens that `rows` names, which a decode graph does not take."""
        feeds = {
            TOKENS: tokens,
            POSITION: np.array(positions),
            write_index_name(0): np.array([self.geometry.slot(position) for position in positions]),
            **self.rings,
        }
        if rows is not None:
            feeds[ROWS] = np.array(rows)
        names = [str(value.name) for value in self.model.graph.outputs]
        outputs = dict(zip(names, self._evaluator.run(None, feeds), strict=True))
        logits: np.ndarray = outputs.pop(LOGITS)
        slots = feeds[write_index_name(0)]
        self.rings = {name.rpartition(".")[0]: self._updated(name, array, slots) for name, array in outputs.items()}
        return logits

    def _updated(self, output: str, array: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """A ring as it comes out, or as it was with its new rows [B,G,T,D] in their slots."""
        name, _, kind = output.rpartition(".")
        if kind == "updated":
            return array
        ring = self.rings[name].copy()
        for row, slot in enumerate(slots):
            ring[row, :, slot : slot + array.shape[2]] = array[row]
        return ring


def zero_rings(model: ir.Model) -> dict[str, np.ndarray]:
    rings = {str(value.name): value.shape for value in model.graph.inputs if str(value.name).startswith("cache.")}
    return {name: np.zeros([int(size) for size in shape], np.float32) for name, shape in rings.items() if shape}  # type: ignore[arg-type]
