"""Engines from graphs that only read the rings, by the real TensorRT-RTX builder, and what the target tensorrt-10.3 refuses."""

import json
import sys
from pathlib import Path

import pytest
from sinkring.exporter import build
from sinkring.exporter.build import build_engine
from sinkring.exporter.passes import lower_appended
from sinkring.runtime.errors import BuildError, BundleError, DependencyError, UnsupportedError
from sinkring.runtime.manifest import Manifest

from tests.exporter.enterprise import Enterprise
from tests.exporter.tiny_bundle import export_tiny
from tests.models.tiny import tiny_llama

TARGET = "tensorrt-10.3"


def export_rows(folder: Path, **options: object) -> Path:
    """Two layers, H=6, G=2, D=16, S=2, C=16."""
    model = tiny_llama(heads=6, kv_heads=2, head_dim=16)
    return export_tiny(folder, model, sinks=2, window=6, chunk=4, **{"targets": [TARGET], **options})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Enterprise:
    """TensorRT 10.3 on a machine with a GPU of sm 87."""
    enterprise = Enterprise()
    monkeypatch.setattr(enterprise, "__version__", "10.3.0", raising=False)
    monkeypatch.setitem(sys.modules, "tensorrt", enterprise)
    monkeypatch.setattr(build, "present_sm", lambda: 87)
    monkeypatch.setattr("sinkring.exporter.engine_builder.present_sm", lambda: 87)
    return enterprise


def test_tensorrt_rtx_reads_the_rings_where_they_lie(bundle: Path) -> None:
    decode, prefill = build_engine(bundle, "tensorrt-rtx")
    assert (decode.role, decode.target, decode.graph_path) == ("decode", "tensorrt-rtx", "decode.appended.onnx")
    assert decode.faults == prefill.faults == ()
    for layer in decode.plan.layers:
        assert layer.copies == ()
        assert layer.attention
        assert [update.in_place for update in layer.updates] == [True, True]
        assert all(update.kernel for update in layer.updates), "no kernel gives the rows out"
    assert {copy.kind for layer in prefill.plan.layers for copy in layer.copies} <= {"operand"}
    assert prefill.profiles["tokens"] == ((1, 1), (1, 4), (1, 4))
    engines = Manifest.read(bundle).engines
    assert {(engine.role, engine.target) for engine in engines} == {("decode", "tensorrt-rtx"), ("prefill", "tensorrt-rtx")}
    assert json.loads((bundle / engines[0].report).read_text())["contract"]["update"] == "rows"


def test_a_decode_step_in_matrix_products_fails_for_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, and why a step is not given that form."""
    monkeypatch.setattr(lower_appended, "_attend_one", lower_appended._attend_chunk)
    with pytest.raises(BuildError, match="makes a copy of"):
        build_engine(export_rows(tmp_path), "tensorrt-rtx")


def test_tensorrt_10_is_built_for_by_the_same_code(bundle: Path, tensorrt: Enterprise) -> None:
    reports = build_engine(bundle, TARGET)
    assert [report.engine_path for report in reports] == [
        f"engines/{TARGET}-10.3.0-sm87-fp32/decode.engine",
        f"engines/{TARGET}-10.3.0-sm87-fp32/prefill.engine",
    ]
    assert [report.faults for report in reports] == [(), ()]


@pytest.mark.parametrize("version", ["10.4.0", "11.4.1", "10.30.0"])
def test_another_version_is_refused_by_name(bundle: Path, tensorrt: Enterprise, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(tensorrt, "__version__", version)
    with pytest.raises(DependencyError, match=rf"'tensorrt-10\.3' is for TensorRT 10\.3, and tensorrt is {version} here"):
        build_engine(bundle, TARGET)


def test_a_bundle_of_the_other_form_is_refused(tiny_bundle: Path, tensorrt: Enterprise) -> None:
    with pytest.raises(BundleError, match=r"no decode graph for target 'tensorrt-10\.3'.*export again with that target"):
        build_engine(tiny_bundle, TARGET)


def test_bfloat16_is_refused_when_exporting(tmp_path: Path) -> None:
    for name in ("dtype", "cache_dtype"):
        with pytest.raises(UnsupportedError, match=rf"{name}='bf16' with target tensorrt-10\.3: use fp16"):
            export_rows(tmp_path / name, **{name: "bf16"})


def test_picking_tokens_on_the_device_is_refused(bundle: Path) -> None:
    for options in ({"next_token": True}, {"sample_top_k": 4}):
        with pytest.raises(UnsupportedError, match=r"next_token, sample_top_k: decode\.appended\.onnx only reads its caches"):
            build_engine(bundle, "tensorrt-rtx", **options)  # type: ignore[arg-type]
