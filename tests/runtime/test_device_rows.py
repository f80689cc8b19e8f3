"""Graphs that give out new rows, on the doubles of TensorRT 10.3 and CUDA: where the rows go, in what order, and in how many copies."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sinkring.exporter.conformance.suite import check_conformance
from sinkring.exporter.export import export_decoder
from sinkring.runtime import Decoder, open_bundle
from sinkring.runtime.backends.device_rows import DeviceRows
from sinkring.runtime.errors import BundleError, DependencyError

from tests.exporter.tiny_bundle import export_tiny
from tests.models.tiny_families import tiny_model as tiny_family
from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines
from tests.runtime.tensorrt_double import TensorRtDouble

TARGET, VERSION = "tensorrt-10.3", "10.3.0"
IDS = np.random.default_rng(0).integers(0, 97, 60)


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """S = 2, W = 4, three rows."""
    out = tmp_path_factory.mktemp("rows") / "bundle"
    export_decoder(tiny_model, out, sinks=2, window=4, chunk=4, batch=3, slack=6, targets=[TARGET])
    return out


@pytest.fixture(scope="module")
def bundle(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(exported, tmp_path_factory.mktemp("engines") / "bundle", TARGET, version=VERSION)


@pytest.fixture
def cuda() -> CudaDouble:
    return CudaDouble()


@pytest.fixture
def trt(cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> TensorRtDouble:
    double = install_doubles(monkeypatch, cuda, "tensorrt")
    double.__version__ = VERSION
    return double


@pytest.fixture
def decoder(bundle: Path, trt: TensorRtDouble) -> Iterator[Decoder]:
    with open_bundle(bundle, TARGET) as opened:
        yield opened


def drive(decoder: Decoder) -> list[np.ndarray]:
    """Three rows at different positions, chunks of every length, steps of all of them and of some, three wraps. All logits."""
    streams = [decoder.stream() for _ in range(3)]
    got = [stream.feed(IDS[:length], all_logits=True) for stream, length in zip(streams, (21, 5, 2), strict=True)]
    for turn, token in enumerate(IDS[:40]):
        going = streams if turn % 3 else streams[turn % 2 :: 2]
        got += list(decoder.step({stream: int(token) for stream in going}).values())
    got += [stream.feed(IDS[:length], all_logits=True) for stream, length in zip(streams, (3, 9, 1), strict=True)]
    return got


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_streams_equal_those_of_onnxruntime(bundle: Path, trt: TensorRtDouble, cuda_graph: bool) -> None:
    with open_bundle(bundle, target=TARGET, threads=1) as expected, open_bundle(bundle, TARGET, cuda_graph=cuda_graph) as decoder:
        assert decoder.backend.name == TARGET
        for one, other in zip(drive(decoder), drive(expected), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4, rtol=0)
        for row in range(3):
            for name, held in expected.backend.read_row(row).items():
                np.testing.assert_allclose(decoder.backend.read_row(row)[name], held, atol=1e-5, err_msg=name)
    assert trt.events.count("capture decode") == cuda_graph


def test_a_step_is_one_launch_and_one_copy_for_each_stream(decoder: Decoder, cuda: CudaDouble) -> None:
    """Behind the launch, in stream order, and nothing for an idle row."""
    streams = [decoder.stream() for _ in range(3)]
    for stream in streams:
        stream.feed(IDS[:9])
    cuda.calls.clear()
    decoder.step(dict.fromkeys(streams, 3))
    assert cuda.calls == ["cudaGraphLaunch", *["cudaMemcpy3DAsync"] * 3, "cudaStreamSynchronize"]
    cuda.calls.clear()
    decoder.step({streams[1]: 3})
    assert cuda.calls == ["cudaGraphLaunch", "cudaMemcpy3DAsync", "cudaStreamSynchronize"]


def test_nothing_is_allocated_after_opening(decoder: Decoder, cuda: CudaDouble) -> None:
    before, used = decoder.backend.addresses(), (cuda.used_bytes(), len(cuda.allocated), len(cuda.pinned))
    cuda.calls.clear()
    drive(decoder)
    assert not {"cudaMalloc", "cudaMallocHost"} & set(cuda.calls)
    assert (decoder.backend.addresses(), cuda.used_bytes(), len(cuda.allocated), len(cuda.pinned)) == (before, *used)


def test_what_goes_astray_is_seen(bundle: Path, trt: TensorRtDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison above."""
    write = DeviceRows.write_step
    with open_bundle(bundle, target=TARGET, threads=1) as expected:
        right = drive(expected)
    monkeypatch.setattr(DeviceRows, "write_step", lambda self, row, slots: write(self, row, [max(slot - 1, 0) for slot in slots]))
    with open_bundle(bundle, TARGET) as decoder:
        wrong = drive(decoder)
    assert max(np.abs(one - other).max() for one, other in zip(wrong, right, strict=True)) > 0.1


def test_rings_of_two_geometries_and_float16(tmp_path: Path, trt: TensorRtDouble) -> None:
    options = {"policy": "streaming", "sinks": 2, "window": 6, "chunk": 3, "batch": 3, "cache_dtype": "fp16", "targets": [TARGET]}
    exported = export_tiny(tmp_path / "hybrid", tiny_family("gemma3_text"), **options)
    bundle = with_engines(exported, tmp_path / "bundle", TARGET, version=VERSION)
    with open_bundle(bundle, target=TARGET, threads=1) as expected, open_bundle(bundle, TARGET) as decoder:
        assert len(decoder.manifest.rings) == 2
        for one, other in zip(drive(decoder), drive(expected), strict=True):
            np.testing.assert_allclose(one, other, atol=0.05, rtol=0)


def test_every_invariant_holds(bundle: Path, trt: TensorRtDouble) -> None:
    # Growth is measured in time and memory, which here are the doubles'; what export refuses has nothing to do with the form.
    only = [f"I{number}" for number in range(1, 13) if number not in (8, 11)]
    found = check_conformance(bundle, "quick", backend=TARGET, only=only)
    assert [f"{check.invariant}: {check.detail}" for check in found.checks if check.passed is False] == []
    assert trt.events.count("capture decode") > 10


@pytest.mark.parametrize("version", ["10.4.0", "11.4.1", "8.6.1", "10.30.1"])
def test_another_version_is_refused_by_name(bundle: Path, trt: TensorRtDouble, version: str) -> None:
    trt.__version__ = version
    with pytest.raises(DependencyError, match=rf"'tensorrt-10\.3' is for TensorRT 10\.3, and tensorrt is {version} here"):
        open_bundle(bundle, TARGET)


def test_a_bundle_of_the_other_form_is_refused(tiny_bundle: Path, trt: TensorRtDouble) -> None:
    with pytest.raises(BundleError, match=r"no decode graph for target 'tensorrt-10\.3'"):
        open_bundle(tiny_bundle, TARGET)


def test_tensorrt_rtx_runs_them_too(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: CudaDouble) -> None:
    bundle = with_engines(exported, tmp_path / "bundle", "tensorrt-rtx")
    install_doubles(monkeypatch, cuda)
    with open_bundle(bundle, target=TARGET, threads=1) as expected, open_bundle(bundle, "tensorrt-rtx") as decoder:
        np.testing.assert_allclose(decoder.stream().feed(IDS[:21]), expected.stream().feed(IDS[:21]), atol=1e-4, rtol=0)
