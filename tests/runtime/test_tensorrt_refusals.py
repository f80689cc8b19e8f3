"""What the TensorRT backend refuses, each by name and with both values: engines that are stale or odd, machines that lack something."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import open_bundle
from sinkring.runtime.errors import BundleError, DependencyError, DeviceError, InputError, SinkringError
from sinkring.runtime.manifest import MANIFEST_NAME, Manifest

from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import VERSION, install_doubles, with_engines
from tests.runtime.tensorrt_double import TensorRtDouble


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return with_engines(tiny_bundle, tmp_path / "bundle")


@pytest.fixture
def cuda() -> CudaDouble:
    return CudaDouble()


@pytest.fixture
def trt(cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> TensorRtDouble:
    return install_doubles(monkeypatch, cuda)


def refused(bundle: Path, error: type[SinkringError], **options: Any) -> str:
    with pytest.raises(error) as caught:
        open_bundle(bundle, "tensorrt-rtx", verify=False, **options)
    return str(caught.value)


def edit(bundle: Path, change: Callable[[Manifest], Manifest]) -> None:
    (bundle / MANIFEST_NAME).write_text(change(Manifest.read(bundle)).to_json(), encoding="utf-8")


def each_engine(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: dataclasses.replace(
        manifest, engines=tuple(dataclasses.replace(engine, **changes) for engine in manifest.engines)
    )


def test_no_engine_names_what_builds_it(bundle: Path, trt: TensorRtDouble) -> None:
    edit(bundle, lambda manifest: dataclasses.replace(manifest, engines=()))
    message = refused(bundle, BundleError)
    assert "no decode engine of tensorrt-rtx for sm=89 (Double GPU), but none" in message
    assert "sinkring build BUNDLE --target tensorrt-rtx --sm 89" in message


def test_an_engine_for_another_gpu(bundle: Path, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    cuda.sm = 120
    assert "for sm=120 (Double GPU), but sm=89; build it: sinkring build BUNDLE --target tensorrt-rtx --sm 120" in refused(
        bundle, BundleError
    )


def test_an_engine_of_a_graph_that_has_changed(bundle: Path, trt: TensorRtDouble) -> None:
    edit(bundle, each_engine(graph_sha256="ab" * 32))
    assert (
        "is stale, it was built from decode.fused.onnx of sha256 abababababab..., the bundle's decode graph is decode.fused.onnx of"
        in refused(bundle, BundleError)
    )


def test_an_engine_of_another_version(bundle: Path, trt: TensorRtDouble) -> None:
    edit(bundle, each_engine(builder_version="1.0.0"))
    assert f"is stale, it was built by tensorrt-rtx 1.0.0, here is {VERSION}; build it again" in refused(bundle, BundleError)


def test_an_update_that_is_no_alias(bundle: Path, trt: TensorRtDouble) -> None:
    trt.faults[("alias", "cache.1.k.updated")] = None
    message = refused(bundle, BundleError)
    assert "output 'cache.1.k.updated' is a tensor of its own, not 'cache.1.k' updated in place" in message
    trt.faults[("alias", "cache.1.k.updated")] = "cache.1.v"
    assert "is updated in 'cache.1.v', not 'cache.1.k'" in refused(bundle, BundleError)


def test_an_engine_of_other_shapes(bundle: Path, trt: TensorRtDouble) -> None:
    trt.faults[("shape", "cache.0.v")] = [1, 2, 24, 8]
    assert "input 'cache.0.v' is float32 (1, 2, 24, 8) in the engine, float32 (1, 2, 16, 8) by the manifest; build it again" in refused(
        bundle, BundleError
    )


def test_a_tensor_on_the_host(bundle: Path, trt: TensorRtDouble) -> None:
    trt.faults[("location", "position")] = "HOST"
    assert "'position' is read on the host, and all tensors are bound in device memory" in refused(bundle, BundleError)


def test_a_prefill_engine_for_shorter_chunks(bundle: Path, trt: TensorRtDouble) -> None:
    trt.faults["most tokens"] = 3
    assert "'tokens' takes 1 to 3 tokens, the manifest's chunk is 4; build it again" in refused(bundle, BundleError)


def test_a_contract_that_the_graph_was_not_made_for(bundle: Path, trt: TensorRtDouble) -> None:
    """Slots and window are in no engine's shapes, and a wrong number would write the wrong slot."""
    report = bundle / Manifest.read(bundle).engines[0].report
    edit(bundle, lambda manifest: dataclasses.replace(manifest, policy="native"))
    assert 'was made for policy "streaming", the manifest says "native"' in refused(bundle, BundleError)
    report.write_text("{}".ljust(report.stat().st_size))
    assert "is no build report with a contract" in refused(bundle, BundleError)


def test_an_engine_that_does_not_load(bundle: Path, trt: TensorRtDouble) -> None:
    trt.faults["does not load"] = True
    assert "cannot load it on Double GPU, sm=89: Target GPU SM 89 is not supported by this engine; build it again" in refused(
        bundle, BundleError
    )


def test_an_engine_that_cannot_be_captured(bundle: Path, trt: TensorRtDouble) -> None:
    trt.faults["not capturable"] = True
    assert "cannot be captured as a CUDA graph; build it again, or open with cuda_graph=False" in refused(bundle, BundleError)
    with open_bundle(bundle, "tensorrt-rtx", cuda_graph=False) as decoder:
        assert decoder.stream().feed([1, 2]).shape == (97,)


def test_a_gpu_with_too_little_memory(bundle: Path, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    cuda.memory_bytes = 4000
    assert "4 caches of float32 [1, 2, 16, 8]: 4096 bytes of device memory, 4000 are free (cudaErrorMemoryAllocation" in refused(
        bundle, DeviceError
    )
    assert (cuda.allocated, cuda.pinned, cuda.open_streams) == ({}, {}, 0)


def test_no_gpu_and_no_driver(bundle: Path, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    cuda.devices = 0
    assert "runs on an NVIDIA GPU, and CUDA reports no GPU; install a driver" in refused(bundle, DependencyError)
    cuda.no_driver = True
    assert "CUDA reports cudaErrorInsufficientDriver (CUDA driver version is insufficient" in refused(bundle, DependencyError)


@pytest.mark.parametrize("module", ["tensorrt_rtx", "cuda.bindings.runtime"])
def test_a_missing_package(bundle: Path, trt: TensorRtDouble, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'sinkring[tensorrt-rtx]'" in refused(bundle, DependencyError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 2}, "option 'threads' is not known to the backend tensorrt-rtx; it takes: cuda_graph"),
        ({"cuda_graph": 1}, "cuda_graph=1: must be True or False"),
        ({"target": "onnxruntime"}, "target 'onnxruntime' with backend 'tensorrt-rtx'"),
    ],
)
def test_options_that_make_no_sense(bundle: Path, trt: TensorRtDouble, options: dict[str, Any], words: str) -> None:
    assert words in refused(bundle, InputError, **options)


def test_a_write_past_the_end_of_the_cache(bundle: Path, trt: TensorRtDouble) -> None:
    """TensorRT drops it without a word."""
    with open_bundle(bundle, "tensorrt-rtx") as decoder:
        backend = decoder.backend
        before = backend.read_row(0)
        with pytest.raises(InputError, match=r"write_index\.0: row 0 writes 4 tokens from slot 13, the cache has C=16 slots"):
            backend.prefill(0, np.arange(4), 0, (13,), 1)
        backend.write_index[0][0] = 16
        with pytest.raises(InputError, match="row 0 writes 1 tokens from slot 16"):
            backend.decode()
        assert all((held == before[name]).all() for name, held in backend.read_row(0).items())
