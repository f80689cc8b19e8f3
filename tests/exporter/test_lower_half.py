"""The form for Turing: float16 products, as near to plain attention as float16 scores are, and an engine where there was none."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from sinkring.exporter.export import export_decoder
from sinkring.exporter.node import ring_attention
from sinkring.exporter.passes.lower_half import LowerToHalfAttention
from sinkring.exporter.plan_table import plan_rows
from sinkring.exporter.targets import TARGETS
from sinkring.runtime.backends.engine import TURING_TARGET, engine_target
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Manifest

from tests.exporter.lowered_ring import FORMS, check, lowered
from tests.exporter.ring_case import RingCase, make_call, session
from tests.models.tiny import tiny_llama

# Scores reach some 30 here, and 2**-11 of that is 0.015; through the exponential that is the share of a weight that is lost.
HALF = 0.05


@pytest.fixture(autouse=True)
def _half_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "half", LowerToHalfAttention)


@pytest.mark.parametrize("policy", ["native", "streaming"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_within_the_rounding_of_scores(policy: str, tokens: int) -> None:
    for sinks, window, heads, groups in ((0, 4, 4, 2), (2, 4, 3, 1), (3, 2, 2, 2)):
        check("half", RingCase(sinks, window, tokens + 1, tokens, 2, heads, groups, policy, cache_dtype="float16"), [tokens], HALF, HALF)


def test_a_wrong_window_is_further_off() -> None:
    case, wrong = (RingCase(2, window, 3, 1, cache_dtype="float16") for window in (4, 3))
    calls = [make_call(case, [case.geometry.capacity + 2], 1, seed) for seed in range(4)]
    graph = session(lowered("half", case))
    assert all(np.abs(graph.run(None, call.inputs)[0] - call.attended).max() <= HALF for call in calls)
    assert max(np.abs(ring_attention(wrong.attributes, **call.inputs)[0] - call.attended).max() for call in calls) > 4 * HALF


def test_turing_gets_engines_from_graphs_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    tiny_llama(heads=8, kv_heads=2, head_dim=64, std=0.2).save_pretrained(tmp_path / "model")
    bundle = tmp_path / "bundle"
    export_decoder(tmp_path / "model", bundle, sinks=4, window=124, chunk=16, dtype="fp16", targets=["tensorrt-rtx", TURING_TARGET])
    manifest = Manifest.read(bundle)
    assert [engine_target(manifest, "tensorrt-rtx", sm) for sm in (75, 89)] == [TURING_TARGET, "tensorrt-rtx"]
    rows = plan_rows(bundle, [75])
    assert [(row.role, row.refusal, row.in_place) for row in rows] == [("decode", "", "4/4"), ("prefill", "", "4/4")]
    assert (rows[0].copies, rows[0].attention) == (0, "_gemv_mha_v1")
    model = onnx.shape_inference.infer_shapes(onnx.load(bundle / manifest.graph("prefill", TURING_TARGET).path))
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    assert {types[node.output[0]] for node in model.graph.node if node.op_type in ("MatMul", "Gemm")} == {TensorProto.FLOAT16}
    assert {types[node.output[0]] for node in model.graph.node if node.op_type == "Softmax"} == {TensorProto.FLOAT}


def test_only_float16_and_only_by_name(tiny_model: Path, tmp_path: Path) -> None:
    assert TARGETS[TURING_TARGET].only_float16
    for options in ({"dtype": "fp32"}, {"dtype": "fp16", "cache_dtype": "fp32"}):
        with pytest.raises(UnsupportedError, match="target tensorrt-rtx-sm75: its products are float16"):
            export_decoder(tiny_model, tmp_path / "bundle", targets=[TURING_TARGET], window=64, chunk=8, **options)
