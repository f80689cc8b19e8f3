"""The builder's calls on real, tiny graphs; nothing here needs a GPU."""

import sys
from pathlib import Path
from types import ModuleType

import onnx
import pytest
from sinkring.exporter import engine_builder
from sinkring.exporter.engine_builder import check_sm, compile_engine, load_builder, present_sm, supported_sms
from sinkring.exporter.plan import read_plan
from sinkring.runtime.errors import BuildError, DependencyError, UnsupportedError

from tests.exporter.hand_bundle import CHUNK, ring_graph, ring_states, write_bundle

PREFILL_PROFILES = {"tokens": ((1, 1), (1, CHUNK), (1, CHUNK)), "rows": ((1,), (1,), (CHUNK,))}


@pytest.fixture(scope="module")
def trt() -> ModuleType:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    return load_builder("tensorrt-rtx")


def write(folder: Path, model: onnx.ModelProto) -> Path:
    return write_bundle(folder, {"decode": model}) / "decode.onnx"


@pytest.mark.parametrize("sm", [80, 89, 120])
def test_a_real_decode_plan_is_good_on_every_generation(trt: ModuleType, tmp_path: Path, sm: int) -> None:
    compiled = compile_engine(trt, "tensorrt-rtx", write(tmp_path, ring_graph()), sm, {})
    report = read_plan(compiled.plan_text, ring_states(), 1)
    assert report.faults() == ()
    assert report.layers[0].fused
    assert compiled.engine.nbytes > 1000
    assert compiled.build_s > 0


@pytest.mark.parametrize("form", [{"scale": 1.0}, {"write": "where"}, {"write": "scatter_nd"}, {"write": "shift"}, {"attend": "folded"}])
def test_real_plans_that_copy_a_cache_are_caught(trt: ModuleType, tmp_path: Path, form: dict) -> None:
    compiled = compile_engine(trt, "tensorrt-rtx", write(tmp_path, ring_graph(**form)), 89, {})
    assert read_plan(compiled.plan_text, ring_states(), 1).faults()


def test_a_real_chunk_with_dynamic_tokens_updates_in_place(trt: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path, ring_graph(tokens=CHUNK, attend="folded"))
    report = read_plan(compile_engine(trt, "tensorrt-rtx", path, 89, PREFILL_PROFILES).plan_text, ring_states(), CHUNK)
    assert report.faults() == ()
    assert report.warnings() == ()
    assert all(update.in_place for update in report.layers[0].updates)


def test_a_graph_that_the_parser_refuses_is_named_with_its_reason(trt: ModuleType, tmp_path: Path) -> None:
    model = ring_graph()
    for node in model.graph.node:
        if node.op_type == "TensorScatter":
            next(attribute for attribute in node.attribute if attribute.name == "mode").s = b"circular"
    with pytest.raises(BuildError, match=r"decode\.onnx: tensorrt-rtx .* cannot parse the graph: .*[Ll]inear"):
        compile_engine(trt, "tensorrt-rtx", write(tmp_path, model), 89, {})


def test_a_graph_that_cannot_be_built_is_named_with_its_reason(trt: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path, ring_graph(tokens=CHUNK))
    with pytest.raises(BuildError, match=r"decode\.onnx: tensorrt-rtx .* could not build for sm=89: .*profile"):
        compile_engine(trt, "tensorrt-rtx", path, 89, {})


def test_progress_is_reported_and_stdout_stays_clean(trt: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    seen: list[tuple[str, int, int]] = []
    compile_engine(trt, "tensorrt-rtx", write(tmp_path, ring_graph()), 89, {}, lambda *step: seen.append(step))
    assert seen
    assert all(0 <= done <= steps for _, done, steps in seen)
    assert any(done == steps > 0 for _, done, steps in seen)
    assert capfd.readouterr().out == ""


def test_an_exception_in_progress_stops_the_build_and_comes_out(trt: ModuleType, tmp_path: Path) -> None:
    def stop(phase: str, done: int, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_engine(trt, "tensorrt-rtx", write(tmp_path, ring_graph()), 89, {}, stop)


def test_an_unknown_sm_names_the_known_ones(trt: ModuleType) -> None:
    assert {80, 86, 89, 120} <= set(supported_sms(trt))
    with pytest.raises(UnsupportedError, match=r"sm=90: tensorrt-rtx .* compiles for 75, 80, 86, 89, 120, 121"):
        check_sm(trt, "tensorrt-rtx", 90)


def test_an_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"'openvino': engines are built for tensorrt, tensorrt-10\.3, tensorrt-rtx"):
        load_builder("openvino")


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(DependencyError, match=r"pip install 'sinkring\[tensorrt-rtx\]'"):
        load_builder("tensorrt-rtx")


def test_target_tensorrt_needs_the_gpu_it_builds_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    with pytest.raises(DependencyError, match="no NVIDIA driver is here"):
        present_sm()


def test_target_tensorrt_refuses_another_gpu(trt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_builder, "present_sm", lambda: 90)
    check_sm(trt, "tensorrt", 90)
    with pytest.raises(UnsupportedError, match="sm=89: target 'tensorrt' builds for the GPU that is present, which is sm=90"):
        check_sm(trt, "tensorrt", 89)


def test_a_builder_that_logs_no_plan_is_asked_through_the_engine(trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_builder, "read_kernels", lambda text: ())
    monkeypatch.setattr(engine_builder, "_inspect", lambda trt, log, engine: f"inspected {engine.nbytes}")
    compiled = compile_engine(trt, "tensorrt-rtx", write(tmp_path, ring_graph()), 89, {})
    assert compiled.plan_text == f"inspected {compiled.engine.nbytes}"
