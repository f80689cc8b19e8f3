"""The plans of a small model for every GPU that the builder knows, kept beside the tests.

`python -m tests.exporter.plan_golden` writes them anew, once a changed plan was looked at and found good.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

from sinkring.exporter.engine_builder import load_builder, supported_sms
from sinkring.exporter.export import export_decoder
from sinkring.exporter.plan_table import PlanRow, plan_rows

from tests.models.tiny import tiny_llama

GOLDEN = Path(__file__).with_name("plan_golden.json")
# Of the weights, by dtype. With 0.2 bfloat16 rounds away what layer 1's values add, and export refuses a weight without an effect.
DEVIATIONS = {"fp32": 0.2, "fp16": 0.2, "bf16": 0.05}


def found_rows(folder: Path) -> list[PlanRow]:
    """Both graphs in each dtype for each GPU, built now; `folder` is scratch space."""
    rows = []
    for dtype, deviation in DEVIATIONS.items():
        model, bundle = folder / f"{dtype}-model", folder / dtype
        # Heads as real models have them: on these depends which kernels the builder has.
        tiny_llama(heads=8, kv_heads=2, head_dim=64, std=deviation).save_pretrained(model)
        export_decoder(model, bundle, sinks=4, window=124, chunk=16, dtype=dtype, targets=["tensorrt-rtx"])
        rows += plan_rows(bundle, supported_sms(load_builder("tensorrt-rtx")))
    return rows


def kept_rows() -> list[PlanRow]:
    return [PlanRow(**row) for row in json.loads(GOLDEN.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        rows = [dataclasses.asdict(row) for row in found_rows(Path(scratch))]
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
