"""Every way a bundle can be quietly wrong must fail its validation, and say where."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sinkring.exporter import export as exporting
from sinkring.exporter import validate_bundle
from sinkring.exporter.verdict import Validation
from sinkring.runtime.backends.onnxruntime import OnnxRuntimeBackend
from sinkring.runtime.manifest import MANIFEST_NAME
from sinkring.runtime.ring import RingGeometry

from tests.exporter.tiny_bundle import accept_files, broken_copy, export_tiny, shared_tiny
from tests.models.tiny import tiny_llama

STEPS = 40
POLICIES = ("streaming", "native")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """S=2, W=4, M=6, C=8, by policy; with one slot to spare, so that a window or a sink more would still be consistent."""
    return {policy: shared_tiny(tmp_path_factory, policy=policy, sinks=2, window=4, chunk=2) for policy in POLICIES}


@pytest.fixture(autouse=True)
def no_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that lies is refused when the bundle is opened: here the lie is in the graphs too, as a wrong exporter would write it."""
    monkeypatch.setattr("sinkring.runtime.backends.onnxruntime.check_contract", lambda *_: None)


def failed(result: Validation, factor: float = 10) -> str:
    """The failures as one text, once it is clear that the error is far from the tolerance."""
    assert not result.passed
    assert max(row.max_error for row in result.regions) > factor * result.tolerance
    return "\n".join(result.failures)


def first_divergence(result: Validation, run: str) -> int | None:
    return next((row.first_divergence for row in result.regions if row.run == run and row.first_divergence is not None), None)


@pytest.mark.parametrize("policy", POLICIES)
def test_window_other_than_claimed(bundles: dict[str, Path], tmp_path: Path, policy: str) -> None:
    def claim(window: int) -> Callable[[dict[str, Any]], None]:
        return lambda raw: raw["rings"][0]["geometry"].update(window_tokens=window)

    longer = validate_bundle(broken_copy(bundles[policy], tmp_path / "longer", claim(5)), STEPS)
    text = failed(longer)
    # The query at S + W is the first that a window of 4 hides a token from.
    assert first_divergence(longer, "decode (onnxruntime)") == 6
    assert "decode (tensorrt, tensorrt-rtx), filling (positions 0..7): max error" in text
    assert "a tolerance of" in text
    assert "behaves as if made with window 4" in text
    shorter = validate_bundle(broken_copy(bundles[policy], tmp_path / "shorter", claim(3)), STEPS)
    failed(shorter)
    assert first_divergence(shorter, "chunks (onnxruntime)") == 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sinks", [1, 3])
def test_sinks_other_than_claimed(bundles: dict[str, Path], tmp_path: Path, policy: str, sinks: int) -> None:
    # The capacity stays what the state tensors have.
    wrong = broken_copy(
        bundles[policy],
        tmp_path / "wrong",
        lambda raw: raw["rings"][0]["geometry"].update(sinks_tokens=sinks, slots=8 - sinks, window_tokens=4),
    )
    failed(validate_bundle(wrong, STEPS))


def test_policy_other_than_claimed(bundles: dict[str, Path], tmp_path: Path) -> None:
    wrong = broken_copy(bundles["native"], tmp_path / "wrong", lambda raw: raw.update(policy="streaming"))
    result = validate_bundle(wrong, STEPS)
    failed(result)
    # Up to S + W tokens the two are the same.
    assert first_divergence(result, "decode (onnxruntime)") == 6


def test_slot_arithmetic_that_wraps_too_early(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def early(self: RingGeometry, position: int) -> int:
        sinks = self.sinks_tokens
        return position if position < sinks else sinks + (position - sinks) % (self.slots - 1)

    monkeypatch.setattr(RingGeometry, "slot", early)
    result = validate_bundle(bundles["streaming"], STEPS)
    failed(result)
    # Slots 2 .. 6 take five tokens; the sixth, at position 7, goes to the first of them.
    assert first_divergence(result, "decode (onnxruntime)") == first_divergence(result, "decode (tensorrt, tensorrt-rtx)") == 7
    assert {first_divergence(result, run.name) for run in result.runs} <= {7, 8}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("graphs", ["decode", "prefill"])
def test_positions_off_by_one(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, policy: str, graphs: str) -> None:
    decode, prefill = OnnxRuntimeBackend.decode, OnnxRuntimeBackend.prefill

    def late_decode(self: OnnxRuntimeBackend) -> None:
        self.position += 1
        decode(self)

    def late_prefill(self: OnnxRuntimeBackend, row: int, tokens: Any, position: int, *rest: Any) -> Any:
        return prefill(self, row, tokens, position + 1, *rest)

    if graphs == "decode":
        monkeypatch.setattr(OnnxRuntimeBackend, "decode", late_decode)
    else:
        monkeypatch.setattr(OnnxRuntimeBackend, "prefill", late_prefill)
    text = failed(validate_bundle(bundles[policy], STEPS))
    assert "chunks (onnxruntime)" in text
    # A fault of prefill alone leaves the runs by tokens right.
    assert ("decode (onnxruntime)" in text) == (graphs == "decode")


def test_one_weight_changed(bundles: dict[str, Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(bundles["streaming"], wrong)
    weights = np.fromfile(wrong / "weights.bin", np.float32)
    largest = int(np.abs(weights).argmax())
    weights[largest] *= 1.05
    weights.tofile(wrong / "weights.bin")
    accept_files(wrong)
    failed(validate_bundle(wrong, STEPS))


def test_one_target_wrong_leaves_the_other_right(bundles: dict[str, Path], tmp_path: Path) -> None:
    """TensorRT's decode graph with a window of 5 in a ring of the same size: only its own runs show it."""
    other = export_tiny(tmp_path, policy="streaming", sinks=2, window=5, chunk=2)
    wrong = tmp_path / "wrong"

    def take_other(raw: dict[str, Any]) -> None:
        assert raw["states"] == json.loads((other / MANIFEST_NAME).read_text(encoding="utf-8"))["states"]
        for graph in raw["graphs"]:
            if graph["role"] == "decode" and graph["target"] != "onnxruntime":
                graph["path"] = f"other/{graph['path']}"
        raw["files"].append({"path": "other/decode.fused.onnx", "bytes": 0, "sha256": ""})

    broken_copy(bundles["streaming"], wrong, take_other)
    shutil.copytree(other, wrong / "other")
    accept_files(wrong)
    text = failed(validate_bundle(wrong, STEPS))
    assert "decode (tensorrt, tensorrt-rtx)" in text
    assert "(onnxruntime)" not in text
    assert validate_bundle(wrong, STEPS, target="onnxruntime").passed


def test_one_row_of_a_batch_wrong(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = shared_tiny(tmp_path_factory, policy="streaming", sinks=2, window=4, chunk=3, batch=2)
    decode = OnnxRuntimeBackend.decode

    def second_row_ahead(self: OnnxRuntimeBackend) -> None:
        self.position[1] += 1
        decode(self)

    monkeypatch.setattr(OnnxRuntimeBackend, "decode", second_row_ahead)
    result = validate_bundle(bundle, STEPS)
    failed(result)
    assert first_divergence(result, "decode (onnxruntime)") in (1, 3, 5), "row 1 is looked at in the odd steps"


def test_logits_that_are_not_finite(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decode = OnnxRuntimeBackend.decode

    def poisoned(self: OnnxRuntimeBackend) -> None:
        decode(self)
        if int(self.position[0]) == 20:
            self.logits[0, 0, 3] = np.nan

    monkeypatch.setattr(OnnxRuntimeBackend, "decode", poisoned)
    result = validate_bundle(bundles["native"], STEPS, target="onnxruntime")
    assert result.failures[0].startswith("decode (onnxruntime), later wraps")
    assert "1 of 26 steps have logits that are NaN or infinite" in result.failures[0]
    assert '"max_error": null' in result.to_json()


def test_model_that_ignores_its_context_fails_by_the_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No attention reaches the logits, so all bundles look right: a pass would mean nothing. Export refuses such a model by itself."""
    monkeypatch.setattr(exporting, "check_everything_used", lambda *_: None)
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    bundle = export_tiny(tmp_path, model, sinks=2, window=4, chunk=3)
    result = validate_bundle(bundle, STEPS)
    assert max(row.max_error for row in result.regions) <= result.tolerance
    assert not result.passed
    assert len(result.failures) == 2
    assert all("can't tell a wrong window or sink from a right one" in line for line in result.failures)
