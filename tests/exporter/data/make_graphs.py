"""Writes the golden graph texts next to this file: the smallest RingAttention graph in each lowered form.

Run it from the folder above `tests` after changing a lowering: python -m tests.exporter.data.make_graphs
"""

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from sinkring.exporter.passes.lower_appended import LowerToAppendedAttention
from sinkring.exporter.passes.lower_fused import LowerToFusedAttention
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lower_heads import LowerToHeadAttention

from tests.exporter.ring_case import RingCase, ring_model

_FORMS = {
    "appended": LowerToAppendedAttention,
    "fused": LowerToFusedAttention,
    "grouped": LowerToGroupedAttention,
    "heads": LowerToHeadAttention,
}
_KINDS: dict[str, dict[str, Any]] = {
    "native": {"policy": "native"},
    "streaming": {"policy": "streaming"},
    "alibi": {"policy": "streaming", "rotary": 0, "slopes": (0.5, 0.25)},
    "capped": {"policy": "native", "softcap": 20.0, "sink_logits": True},
    "half": {"policy": "streaming", "cache_dtype": "float16"},
}
NAMES = tuple(f"{form}_{kind}" for form in _FORMS for kind in _KINDS)


def path(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.onnx.txt")


def text(name: str) -> str:
    """The graph FORM_KIND of S=1, W=2, M=2, T=1, B=1 as ONNX text."""
    form, kind = name.split("_")
    model = ring_model(RingCase(sinks=1, window=2, slack=0, tokens=1, heads=2, groups=1, **_KINDS[kind]))
    _FORMS[form]()(model)
    return onnx.printer.to_text(ir.to_proto(model)) + "\n"


if __name__ == "__main__":
    for name in NAMES:
        path(name).write_text(text(name), encoding="utf-8")
