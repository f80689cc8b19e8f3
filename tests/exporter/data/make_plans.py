"""Records the plans that test_plan.py reads: run it from the folder above `tests` after changing a hand graph.

    python -m tests.exporter.data.make_plans

Keeps the list of kernels and the memory lines of the builder's log, word for word, and nothing else.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from sinkring.exporter.engine_builder import compile_engine, load_builder

from tests.exporter.hand_bundle import CHUNK, ring_graph, write_bundle
from tests.exporter.lowered_ring import lowered
from tests.exporter.ring_case import RingCase

PLANS = {
    "good_decode": {"layers": 2},
    "scale_one": {"scale": 1.0},
    "where_write": {"write": "where"},
    "scatter_nd_write": {"write": "scatter_nd"},
    "shift_write": {"write": "shift"},
    "folded_decode": {"attend": "folded"},
    "expanded_prefill": {"tokens": CHUNK},
    "folded_prefill": {"tokens": CHUNK, "attend": "folded"},
    "scale_one_prefill": {"tokens": CHUNK, "attend": "folded", "scale": 1.0},
}
# Of a lowering, one node alone: a softcap, whose products are sums.
SUMMED = RingCase(2, 9, 5, 1, softcap=30.0)
PREFILL_PROFILES = {"tokens": ((1, 1), (1, CHUNK), (1, CHUNK)), "rows": ((1,), (1,), (CHUNK,))}


def graphs(scratch: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Name, file and profiles of each graph, one after the other in the same place."""
    for name, options in PLANS.items():
        bundle = write_bundle(scratch, {"decode": ring_graph(**options)}, layers=options.get("layers", 1))
        yield name, bundle / "decode.onnx", PREFILL_PROFILES if "tokens" in options else {}
    onnx.save(ir.to_proto(lowered("fused", SUMMED)), scratch / "node.onnx")
    yield "summed_decode", scratch / "node.onnx", {}


def record_plans(folder: Path) -> None:
    trt = load_builder("tensorrt-rtx")
    with tempfile.TemporaryDirectory() as scratch:
        for name, path, profiles in graphs(Path(scratch)):
            log = compile_engine(trt, "tensorrt-rtx", path, 89, profiles).log
            kept = [line for line in log.splitlines() if ", LayerType: " in line or " Memory: " in line]
            (folder / f"{name}.plan.txt").write_text("\n".join(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_plans(Path(__file__).parent)
