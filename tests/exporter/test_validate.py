"""A right bundle passes, with figures that say so, in both policies and through several wraps of the ring."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from sinkring.exporter import validate_bundle
from sinkring.exporter.expected_logits import wrong_geometries
from sinkring.runtime.errors import BundleError, InputError, UnsupportedError
from sinkring.runtime.manifest import Manifest

from tests.exporter.tiny_bundle import accept_files, broken_copy, shared_tiny
from tests.models.tiny import tiny_llama

# M is 6, 6 and 8: forty steps go round five times and more.
STEPS = 40
GEOMETRIES: dict[str, dict[str, Any]] = {
    "streaming": {"policy": "streaming", "sinks": 2, "window": 4, "chunk": 3},
    "native": {"policy": "native", "sinks": 2, "window": 4, "chunk": 3},
    "streaming without sinks": {"policy": "streaming", "sinks": 0, "window": 5, "chunk": 4},
    "native, window 1": {"policy": "native", "sinks": 1, "window": 1, "chunk": 7},
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shared_tiny(tmp_path_factory, **options) for name, options in GEOMETRIES.items()}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_right_bundle_passes_in_every_run_and_region(bundles: dict[str, Path], name: str) -> None:
    result = validate_bundle(bundles[name], STEPS)
    assert result.passed, result.failures
    assert result.notes == ()
    # Two decode forms, and each with prefill: four runs of three ages.
    assert [(row.run, row.region) for row in result.regions] == [
        (run, region)
        for run in ("decode (onnxruntime)", "chunks (onnxruntime)", "decode (tensorrt, tensorrt-rtx)", "chunks (tensorrt, tensorrt-rtx)")
        for region in ("filling", "first wrap", "later wraps")
    ]
    manifest = Manifest.read(bundles[name])
    assert {path for run in result.runs for path in run.graphs} == {graph.path for graph in manifest.graphs}
    capacity, slots = manifest.rings[0].geometry.capacity, manifest.rings[0].geometry.slots
    assert [(row.start, row.stop) for row in result.regions[:3]] == [(0, capacity), (capacity, capacity + slots), (capacity + slots, STEPS)]
    assert result.scale > 1
    assert result.tolerance == pytest.approx(1e-4 * result.scale)
    for row in result.regions:
        assert 0 < row.max_error <= result.tolerance / 5, "right graphs are well inside the tolerance"
        assert 0 <= row.kl_mean <= row.kl_max < 1e-8
        assert row.top1_decided == 1
        assert row.decided_steps > 0
        assert row.first_divergence is None
    assert [growth.ratio > 0 and not growth.grows for growth in result.growth] == [True] * 4
    options = GEOMETRIES[name]
    assert [control.name for control in result.controls] == [wrong[0] for wrong in wrong_geometries(options["sinks"], options["window"])]
    for control in result.controls:
        assert control.told_apart
        assert control.max_error > 100 * result.tolerance


def test_result_says_what_was_validated_and_is_json(bundles: dict[str, Path]) -> None:
    result = validate_bundle(str(bundles["streaming"]), STEPS, target="onnxruntime")
    assert {run.targets for run in result.runs} == {("onnxruntime",)}
    raw = json.loads(result.to_json())
    assert raw["passed"] is True
    (ring,) = raw["rings"]
    assert ring["geometry"] == {"sinks_tokens": 2, "window_tokens": 4, "slots": 6, "wraps": True}
    assert (raw["policy"], raw["steps"], raw["bundle"]) == ("streaming", STEPS, str(bundles["streaming"]))
    assert set(raw["versions"]) == {"sinkring", "onnxruntime", "torch", "transformers", "numpy"}
    assert raw["machine"]["cpu"]
    assert len(raw["regions"]) == 6
    ids = np.random.default_rng(0).integers(0, 97, STEPS, dtype=np.int64)
    assert raw["ids_sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()


def test_every_row_of_a_batch_is_validated(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = shared_tiny(tmp_path_factory, policy="streaming", sinks=2, window=4, chunk=3, batch=2)
    result = validate_bundle(bundle, STEPS)
    assert result.passed, result.failures
    assert result.batch == 2
    assert result.runs[0].kind == "decode"


def test_progress_counts_layers_and_steps(bundles: dict[str, Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    validate_bundle(bundles["native"], 20, target="onnxruntime", progress=lambda *call: seen.append(call))
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == [
        "loading the model",
        "oracle",
        "control: window 3",
        "control: sinks 1",
        "decode (onnxruntime)",
        "chunks (onnxruntime)",
    ]
    for stage in stages:
        calls = [(done, total) for name, done, total in seen if name == stage]
        assert calls[0][0] == 0
        assert calls[-1][0] == calls[-1][1]
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert [total for name, _, total in seen if name == "oracle"] == [2, 2, 2]


def test_few_steps_pass_but_say_what_they_cannot_show(bundles: dict[str, Path]) -> None:
    one = validate_bundle(bundles["streaming"], 1)
    assert one.passed, one.failures
    assert one.controls == one.growth == ()
    assert [row.region for row in one.regions] == ["filling", "filling"]
    assert len(one.notes) == 3
    assert "prefill graph was not run" in one.notes[0]
    five = validate_bundle(bundles["streaming"], 5)
    assert five.controls == ()
    assert "the window is not tested" in five.notes[-1]
    # The query at position 5 = S + W - 1 is the first that a shorter window would show itself to.
    assert [control.start for control in validate_bundle(bundles["streaming"], 6).controls] == [5, 5]


def test_model_that_moved_is_given_by_name(bundles: dict[str, Path], tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(bundles["native"].parent / "model", moved)
    gone = broken_copy(bundles["native"], tmp_path / "bundle", lambda raw: raw["model"].update(source=str(tmp_path / "gone")))
    with pytest.raises(BundleError, match=r"gone.*--model"):
        validate_bundle(gone, 20)
    result = validate_bundle(gone, 20, model=str(moved))
    assert result.passed, result.failures
    assert result.model == str(moved)


def test_another_model_is_refused_with_both_hashes(bundles: dict[str, Path], tmp_path: Path) -> None:
    tiny_llama(seed=1).save_pretrained(tmp_path / "other")
    wanted = Manifest.read(bundles["native"]).model.source_sha256
    with pytest.raises(BundleError, match=rf"sha256 {wanted[:12]}.*other has .*--model"):
        validate_bundle(bundles["native"], 20, model=str(tmp_path / "other"))


def test_damage_and_wrong_arguments_are_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="steps=0"):
        validate_bundle(bundles["native"], 0)
    with pytest.raises(BundleError, match="no decode graph for target 'jetson'"):
        validate_bundle(bundles["native"], 20, target="jetson")
    with pytest.raises(BundleError, match="no such bundle"):
        validate_bundle(tmp_path / "none")
    damaged = tmp_path / "damaged"
    shutil.copytree(bundles["native"], damaged)
    weights = bytearray((damaged / "weights.bin").read_bytes())
    weights[100] ^= 1
    (damaged / "weights.bin").write_bytes(weights)
    with pytest.raises(BundleError, match=r"weights\.bin: sha256"):
        validate_bundle(damaged, 20)
    half = broken_copy(bundles["native"], tmp_path / "half", lambda raw: raw.update(dtype="float8"))
    with pytest.raises(UnsupportedError, match="float8"):
        validate_bundle(half, 20)


def test_float16_caches_pass_within_a_limit_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Right graphs are further off than float32's limit, and wrong geometries are told apart all the same."""
    result = validate_bundle(shared_tiny(tmp_path_factory, **GEOMETRIES["native"], cache_dtype="fp16"), STEPS)
    assert result.passed, result.failures
    assert (result.dtype, result.cache_dtype) == ("float32", "float16")
    assert result.tolerance == pytest.approx(3e-3 * result.scale)
    assert result.tolerance > max(row.max_error for row in result.regions) > 1e-4 * result.scale
    assert all(control.told_apart and control.max_error > 10 * result.tolerance for control in result.controls)


def test_bfloat16_is_proven_without_its_roundings_and_then_as_it_runs(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    bundle = shared_tiny(tmp_path_factory, policy="native", sinks=2, window=4, chunk=3, batch=2, dtype="bf16")
    result = validate_bundle(bundle, 60, target="tensorrt-rtx")
    assert result.passed, result.failures
    assert (result.bundle, result.dtype, result.cache_dtype) == (str(bundle), "bfloat16", "bfloat16")
    assert result.tolerance == pytest.approx(1e-4 * result.scale)
    assert max(row.max_error for row in result.regions) < result.tolerance
    assert all(control.told_apart for control in result.controls)
    as_it_runs = [row for row in result.quantized if row.run.endswith("as it runs")]
    assert as_it_runs
    assert 1e-3 * result.scale < max(row.max_error for row in as_it_runs) < 9.6e-2 * result.scale
    assert len(result.growth) == 4, "two runs, without rounding and as they run"
    # A file that computes something else, in its rounded form alone or in both.
    wrong = tmp_path / "wrong"
    shutil.copytree(bundle, wrong)
    path = wrong / "decode.fused.widened.onnx"
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "Tanh"
    path.write_bytes(model.SerializeToString())
    accept_files(wrong)
    found = validate_bundle(wrong, 60, target="tensorrt-rtx")
    assert any("as it runs" in line and "mean error" in line for line in found.failures), found.failures
    assert any("as it runs" not in line for line in found.failures)


def test_two_validations_in_one_process_agree_to_the_last_bit(bundles: dict[str, Path]) -> None:
    """No hook and no patched attention is left behind."""
    first, second = (validate_bundle(bundles["streaming"], 20, target="onnxruntime") for _ in range(2))
    assert first.regions == second.regions
