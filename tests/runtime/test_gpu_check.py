"""scripts/gpu_check.py on the doubles: what it measures is there, and without a GPU it says so at once."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import open_bundle
from sinkring.runtime.backends.cuda import Device
from sinkring.runtime.backends.token_loop import TokenLoop

from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines

SCRIPTS = Path(__file__).parents[2] / "scripts"
IDS = np.random.default_rng(0).integers(0, 97, 40)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check


def test_without_a_gpu_nothing_is_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cuda = CudaDouble()
    cuda.no_driver = True
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    assert script.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "CUDA reports cudaErrorInsufficientDriver" in said.err
    assert said.err.strip().endswith("nothing was run")


def test_a_row_holds_what_was_measured(
    script: ModuleType, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_bundle(tiny_bundle, target="tensorrt-rtx", threads=1) as decoder, decoder.stream() as stream:
        right = stream.feed(IDS, all_logits=True)
    bundle = with_engines(tiny_bundle, tmp_path / "bundle", sample_top_k=50)
    cuda = CudaDouble()
    install_doubles(monkeypatch, cuda)
    monkeypatch.setattr(script, "CADENCE_S", 0.0)
    device = Device("test", extra="tensorrt-rtx")

    def measure(logits: np.ndarray) -> Any:
        expected = IDS, SimpleNamespace(logits=logits, scale=float(np.abs(right).max()))
        return script.measure(bundle, "tensorrt-rtx", "tensorrt-rtx", {}, expected, device, 1e9, steps=3, cadence_steps=2)

    row = measure(right)
    assert row.passed
    assert row.error < row.tolerance == pytest.approx(1e-4 * np.abs(right).max())
    assert (row.dtype, row.grown_bytes) == ("float32", 0)
    assert row.device_bytes > row.cache_bytes == 4096
    assert 0 < row.p50_ms <= row.p99_ms
    assert row.extend_agrees
    monkeypatch.setattr(TokenLoop, "run", lambda self, tokens, inputs: np.ones((len(inputs["position"]), 1), np.int64))
    assert not measure(right).passed
    monkeypatch.undo()
    install_doubles(monkeypatch, cuda)
    monkeypatch.setattr(script, "CADENCE_S", 0.0)
    assert row.decode_tokens_per_s == pytest.approx(1e3 / row.p50_ms)
    wrong = right.copy()
    wrong[-1, 5] += 0.1
    assert not measure(wrong).passed
    assert measure(np.where(np.arange(97) == 3, np.nan, right)).error == float("inf")
    assert script.measure_bandwidth(device, 4 << 20, rounds=2) > 0
    arguments = SimpleNamespace(json=False, dry_run=False)
    script.report([row], ["tensorrt, fp32: left out: no"], device, 1e9, True, arguments)
    printed = capsys.readouterr().out
    assert "Double GPU, sm=89" in printed
    assert "the tests marked gpu passed" in printed
    assert "tensorrt, fp32: left out: no" in printed


def test_a_dry_run_is_the_whole_script_without_a_gpu(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PARITY_TOKENS", 40)
    monkeypatch.setattr(script, "CADENCE_S", 0.0)
    monkeypatch.setattr(script, "DTYPES", ["fp16"])
    asked: list[str] = []
    monkeypatch.setattr(script, "run_tests", lambda: asked.append("tests") or True)
    assert script.main(["--dry-run", "--steps", "3", "--cadence-steps", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["dry_run"], said["gpu"], said["left_out"], asked) == (True, "Double GPU", [], ["tests"])
    assert [row["backend"] for row in said["rows"]] == ["tensorrt-rtx", "tensorrt", "onnxruntime cuda"]
    assert all(row["dtype"] == "float16" and 0 < row["error"] <= row["tolerance"] and row["grown_bytes"] == 0 for row in said["rows"])
    # The stand-ins are gone.
    assert script.MODEL == "smollm2"
    assert "tensorrt" not in sys.modules


def test_a_wrong_row_or_test_fails_the_dry_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [SimpleNamespace(passed=False), SimpleNamespace(passed=True)]
    monkeypatch.setattr(script, "report", lambda *_: None)
    monkeypatch.setattr(script, "prepare", lambda *_: None)
    monkeypatch.setattr(script, "oracle", lambda *_: None)
    for tests_pass, row, status in ((True, 0, 1), (False, 1, 1), (True, 1, 0)):
        monkeypatch.setattr(script, "run_tests", lambda found=tests_pass: found)
        monkeypatch.setattr(script, "measure", lambda *_, found=rows[row]: found)
        assert script.main(["--dry-run"]) == status
