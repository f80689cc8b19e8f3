"""ONNX Runtime on CUDA, on a double of its GPU provider: the real library over the double's "device" memory."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import open_bundle
from sinkring.runtime.backends import onnxruntime as cpu_backend
from sinkring.runtime.backends import onnxruntime_cuda
from sinkring.runtime.errors import DependencyError, InputError

from tests.runtime.cuda_double import STREAM, CudaDouble
from tests.runtime.onnxruntime_double import CPU, GPU, OrtDouble

IDS = np.random.default_rng(0).integers(0, 97, 60)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", double)
    return double


@pytest.fixture
def ort(cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> OrtDouble:
    double = OrtDouble(cuda)
    monkeypatch.setattr(onnxruntime_cuda, "ort", double)
    monkeypatch.setattr(cpu_backend, "ort", double)
    return double


def test_streams_equal_those_of_the_cpu(tiny_bundle_of_three: Path, cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**options: Any) -> list[np.ndarray]:
        with open_bundle(tiny_bundle_of_three, **options) as decoder:
            first, second = decoder.stream(), decoder.stream()
            logits = [first.feed(IDS[:21], all_logits=True), second.feed(IDS[:3], all_logits=True)]
            for token in IDS[21:]:
                logits += decoder.step({first: int(token)} if token % 2 else {first: int(token), second: int(token)}).values()
            before = decoder.backend.addresses()
            second.reset()
            logits.append(second.feed(IDS[5:9]))
            assert decoder.backend.addresses() == before
            assert decoder.backend.name == "onnxruntime"
        return logits

    expected = run(threads=1)
    double = OrtDouble(cuda)
    monkeypatch.setattr(onnxruntime_cuda, "ort", double)
    monkeypatch.setattr(cpu_backend, "ort", double)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run(device="cuda")
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=0)
    assert (cuda.allocated, cuda.pinned, cuda.open_streams) == ({}, {}, 0)
    assert "cudaStreamBeginCapture" not in cuda.calls


def test_only_decode_is_captured_and_on_our_stream(tiny_bundle: Path, ort: OrtDouble) -> None:
    open_bundle(tiny_bundle, device="cuda", cuda_graph=True).close()
    assert [chosen["enable_cuda_graph"] for chosen in ort.providers] == ["1", "0"]
    assert {chosen["user_compute_stream"] for chosen in ort.providers} == {str(STREAM)}


def test_nodes_on_the_cpu_are_named(tiny_bundle: Path, ort: OrtDouble) -> None:
    ort.on_cpu = {"TensorScatter"}
    with pytest.warns(RuntimeWarning) as caught:
        open_bundle(tiny_bundle, device="cuda").close()
    # For each of two layers K, V, and the sinks' scores, which a filling ring has no need of.
    for warning, role in zip(caught, ("decode", "prefill"), strict=True):
        words = rf"{role}\.heads\.onnx: 6 of \d+ nodes do not run on the GPU: \S+ \(TensorScatter\), "
        assert re.match(words, str(warning.message))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda:1"}, "device='cuda:1': must be 'cpu' or 'cuda'"),
        (
            {"device": "cuda", "threads": 2},
            "option 'threads' is not known to the backend onnxruntime on cuda; it takes: device, cuda_graph",
        ),
        ({"device": "cuda", "cuda_graph": 1}, "cuda_graph=1: must be True or False"),
        ({"cuda_graph": True}, "option 'cuda_graph' is not known to the backend onnxruntime; it takes: device, threads"),
    ],
)
def test_options_that_make_no_sense(tiny_bundle: Path, ort: OrtDouble, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        open_bundle(tiny_bundle, **options)
    assert words in str(caught.value)


def test_what_is_missing_is_named(tiny_bundle: Path, ort: OrtDouble, cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    ort.loads = False
    with pytest.raises(DependencyError, match=r"could not load CUDAExecutionProvider, its libraries"):
        open_bundle(tiny_bundle, device="cuda")
    assert (cuda.allocated, cuda.open_streams) == ({}, 0)
    cuda.devices = 0
    with pytest.raises(DependencyError, match="CUDA reports no GPU"):
        open_bundle(tiny_bundle, device="cuda")
    ort.available = [CPU]
    with pytest.raises(DependencyError, match=r"has no CUDAExecutionProvider; .*pip install 'sinkring\[gpu\]'"):
        open_bundle(tiny_bundle, device="cuda")
    ort.available = [GPU, CPU]
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(DependencyError, match=r"needs the Python package cuda\.bindings .*pip install 'sinkring\[gpu\]'"):
        open_bundle(tiny_bundle, device="cuda")
