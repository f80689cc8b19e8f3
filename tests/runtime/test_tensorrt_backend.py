"""The TensorRT backend on doubles of TensorRT and CUDA that hold each call against the real signatures and run the very graphs.

What only a GPU can show, that the kernels are right and fast, is not here; that the backend binds, copies, orders and frees as it must, is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter.export import export_decoder
from sinkring.runtime import Decoder, open_bundle
from sinkring.runtime.backends import device_states
from sinkring.runtime.backends.device_backend import DeviceBackend
from sinkring.runtime.bfloat16 import from_host

from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines
from tests.runtime.tensorrt_double import TensorRtDouble

V = 97
IDS = np.random.default_rng(0).integers(0, V, 60)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(tiny_bundle, tmp_path_factory.mktemp("engines") / "one")


@pytest.fixture(scope="module")
def bundle_of_three(tiny_bundle_of_three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(tiny_bundle_of_three, tmp_path_factory.mktemp("engines") / "three")


@pytest.fixture
def cuda() -> CudaDouble:
    return CudaDouble()


@pytest.fixture
def trt(cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> TensorRtDouble:
    return install_doubles(monkeypatch, cuda)


@pytest.fixture
def decoder(bundle_of_three: Path, trt: TensorRtDouble) -> Iterator[Decoder]:
    with open_bundle(bundle_of_three, "tensorrt-rtx") as opened:
        yield opened


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_a_stream_equals_that_of_onnxruntime_on_the_same_graphs(bundle: Path, trt: TensorRtDouble, cuda_graph: bool) -> None:
    """Chunks, single steps and three wraps of C = 16. The double runs the same files in the same library."""
    with open_bundle(bundle, "onnxruntime", target="tensorrt-rtx", threads=1) as expected, expected.stream() as oracle:
        wanted = [oracle.feed(IDS[:21], all_logits=True), *(oracle.feed([token]) for token in IDS[21:])]
        with open_bundle(bundle, "tensorrt-rtx", cuda_graph=cuda_graph) as decoder, decoder.stream() as stream:
            assert decoder.backend.name == "tensorrt-rtx"
            got = [stream.feed(IDS[:21], all_logits=True), *(stream.feed([token]) for token in IDS[21:])]
    assert np.ptp(wanted[0]) > 1
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "cache_dtype", "kept_as"), [("fp32", "fp16", np.float16), ("bf16", "bf16", np.uint16)])
def test_caches_in_half_the_bytes(
    tiny_model: Path, tmp_path: Path, trt: TensorRtDouble, dtype: str, cache_dtype: str, kept_as: Any
) -> None:
    export_decoder(tiny_model, tmp_path / "exported", sinks=2, window=4, chunk=4, batch=2, dtype=dtype, cache_dtype=cache_dtype)
    bundle = with_engines(tmp_path / "exported", tmp_path / "bundle")
    with open_bundle(bundle, target="tensorrt-rtx", threads=1) as expected, open_bundle(bundle, "tensorrt-rtx") as decoder:
        logits = []
        for opened in (expected, decoder):
            first, second = opened.stream(), opened.stream()
            logits.append([first.feed(IDS[:21]), second.feed(IDS[:5]), *(opened.step({first: int(token)})[first] for token in IDS[21:])])
            held = opened.backend.read_row(1)
            assert {array.dtype for array in held.values()} == {np.dtype(kept_as)}
        for name, array in expected.backend.read_row(1).items():
            kept = decoder.manifest.cache_dtype
            np.testing.assert_allclose(from_host(array, kept), from_host(held[name], kept), atol=1e-2 if dtype == "fp32" else 0.1)
    for one, other in zip(*logits, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05 if dtype == "fp32" else 0.3, rtol=0)


def test_enterprise_tensorrt_is_the_same_code(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: CudaDouble) -> None:
    bundle = with_engines(tiny_bundle, tmp_path / "bundle", target="tensorrt")
    trt = install_doubles(monkeypatch, cuda, "tensorrt")
    with open_bundle(bundle, "tensorrt") as decoder, decoder.stream() as stream:
        stream.feed(IDS[:5])
        assert decoder.backend.name == "tensorrt"
    assert trt.events


def test_everything_runs_once_before_the_capture_and_then_only_replays(decoder: Decoder, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    assert trt.events == ["run prefill", "run decode", "capture decode"]
    capture = cuda.calls.index("cudaStreamBeginCapture")
    assert "cudaStreamSynchronize" in cuda.calls[:capture]
    assert not {"cudaMalloc", "cudaMallocHost"} & set(cuda.calls[capture:])
    cuda.calls.clear()
    streams = [decoder.stream() for _ in range(3)]
    for stream in streams:
        stream.feed(IDS[:9])
    began = len(cuda.calls)
    for token in IDS[9:30]:
        decoder.step({stream: int(token) for stream in streams})
    assert cuda.calls[began:] == ["cudaGraphLaunch", "cudaStreamSynchronize"] * 21
    assert trt.events[3:] == ["run prefill"] * 9
    assert not {"cudaMalloc", "cudaMallocHost"} & set(cuda.calls)


def test_addresses_and_bytes_never_change(decoder: Decoder, cuda: CudaDouble) -> None:
    before, used = decoder.backend.addresses(), (cuda.used_bytes(), len(cuda.allocated), len(cuda.pinned))
    stream = decoder.stream()
    stream.feed(IDS)
    list(stream.generate(5))
    stream.fork().reset()
    assert decoder.backend.addresses() == before
    assert (cuda.used_bytes(), len(cuda.allocated), len(cuda.pinned)) == used
    assert all(address % 256 == 0 for address in before.values())
    assert decoder.cache_bytes <= used[0]


def test_rows_are_filled_reset_and_kept_by_themselves(decoder: Decoder) -> None:
    backend = decoder.backend
    for row in range(3):
        assert all((held == 0).all() for held in backend.read_row(row).values()), "the warm-up left something"
    poison = {name: np.full_like(held, np.nan) for name, held in backend.read_row(0).items()}
    for row in range(3):
        backend.write_row(row, poison)
    backend.reset_row(1)
    assert [all(np.isnan(held).all() for held in backend.read_row(row).values()) for row in range(3)] == [True, False, True]
    assert all((held == 0).all() for held in backend.read_row(1).values())


def test_prefill_fills_its_row_alone(decoder: Decoder) -> None:
    backend = decoder.backend
    backend.prefill(2, IDS[:3], 0, (5,), 1)
    for name, held in backend.read_row(2).items():
        assert (held != 0).any(axis=(0, 1, 3)).nonzero()[0].tolist() == [5, 6, 7], name
    assert all((held == 0).all() for row in (0, 1) for held in backend.read_row(row).values())


def test_an_engine_computes_a_row_of_logits_at_least(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """None may be wanted, and its profile has no place for that; the cache is that of a call that wants some."""
    backend = decoder.backend
    assert isinstance(backend, DeviceBackend)
    computed, set_shape = [], backend._prefill.set_shape

    def told(name: str, shape: tuple[int, ...]) -> None:
        if name == "rows":
            computed.append(shape)
        set_shape(name, shape)

    monkeypatch.setattr(backend._prefill, "set_shape", told)
    found = [backend.prefill(row, IDS[:4], 0, (0,), wanted).copy() for row, wanted in enumerate((0, 1, 3))]
    assert [len(logits) for logits in found] == [0, 1, 3]
    assert computed == [(1,), (1,), (3,)]
    np.testing.assert_allclose(found[1], found[2][2:], atol=1e-4, rtol=0)
    kept = [backend.read_row(row) for row in range(3)]
    for name, held in kept[1].items():
        assert (held != 0).any()
        np.testing.assert_array_equal(kept[0][name], held, err_msg=name)


def test_idle_rows_keep_their_state_with_two_copies_each(decoder: Decoder, cuda: CudaDouble) -> None:
    streams = [decoder.stream() for _ in range(3)]
    for stream, length in zip(streams, (30, 22, 17), strict=True):
        stream.feed(IDS[:length])
    before = [decoder.backend.read_row(row) for row in range(3)]
    cuda.calls.clear()
    decoder.step({streams[1]: 5})
    # 2 layers, K and V, 2 heads: one box.
    assert cuda.calls == ["cudaMemcpy3DAsync"] * 2 + ["cudaGraphLaunch"] + ["cudaMemcpy3DAsync"] * 2 + ["cudaStreamSynchronize"]
    after = [decoder.backend.read_row(row) for row in range(3)]
    for row in (0, 2):
        assert all((after[row][name] == held).all() for name, held in before[row].items())
    assert any((after[1][name] != held).any() for name, held in before[1].items())


def test_without_putting_back_idle_rows_would_change(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [decoder.stream() for _ in range(2)]
    for stream in streams:
        stream.feed(IDS[:20])
    before = decoder.backend.read_row(0)
    monkeypatch.setattr(device_states.DeviceStates, "put_back", lambda *_: None)
    decoder.step({streams[1]: 5})
    assert any((decoder.backend.read_row(0)[name] != held).any() for name, held in before.items())


def test_a_row_equals_a_stream_alone(decoder: Decoder, bundle: Path) -> None:
    with open_bundle(bundle, "onnxruntime", target="tensorrt-rtx", threads=1) as alone, alone.stream() as oracle:
        first, second = decoder.stream(), decoder.stream()
        first.feed(IDS[:7])
        second.feed(IDS[30:41])
        oracle.feed(IDS[30:41])
        for token in IDS[41:]:
            stepped = decoder.step({second: int(token)} if token % 3 else {second: int(token), first: int(token)})
            np.testing.assert_allclose(stepped[second], oracle.feed([token]), atol=1e-4, rtol=0)


def test_a_snapshot_goes_over_to_onnxruntime(decoder: Decoder, tmp_path: Path) -> None:
    stream = decoder.stream()
    stream.feed(IDS[:25])
    stream.snapshot(tmp_path / "snapshot")
    with open_bundle(decoder.path, "onnxruntime", target="tensorrt-rtx", threads=1) as other:
        np.testing.assert_allclose(other.restore(tmp_path / "snapshot").feed(IDS[25:28]), stream.feed(IDS[25:28]), atol=1e-4, rtol=0)


def test_closing_frees_everything(bundle: Path, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    decoder = open_bundle(bundle, "tensorrt-rtx")
    assert isinstance(decoder.backend, DeviceBackend)
    assert cuda.allocated
    assert cuda.open_streams == len(cuda.graphs) == 1
    decoder.close()
    decoder.close()
    assert (cuda.allocated, cuda.pinned, cuda.graphs, cuda.open_streams) == ({}, {}, {}, 0)
