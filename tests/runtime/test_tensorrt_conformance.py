"""The whole conformance suite with the TensorRT backend, on the doubles: every promise to a stream, kept by engines."""

from pathlib import Path

import pytest
from sinkring.exporter.conformance.suite import check_conformance
from sinkring.exporter.export import export_decoder

from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines


def test_every_invariant_holds(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_decoder(tiny_model, tmp_path / "exported", sinks=2, window=4, chunk=4, batch=2, slack=3)
    bundle = with_engines(tmp_path / "exported", tmp_path / "bundle")
    trt = install_doubles(monkeypatch, CudaDouble())
    # Growth is measured in time and memory, which here are the doubles'.
    only = [f"I{number}" for number in range(1, 13) if number != 8]
    found = check_conformance(bundle, "quick", backend="tensorrt-rtx", only=only)
    assert [f"{check.invariant}: {check.detail}" for check in found.checks if check.passed is False] == []
    assert trt.events.count("capture decode") > 10
    (agreement,) = [check for check in found.checks if check.invariant == "I12"]
    assert "the decode engine of tensorrt-rtx" in agreement.tried
