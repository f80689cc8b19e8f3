"""On a GPU: each backend there against ONNX Runtime on the CPU, on the same graphs. `scripts/gpu_check` runs these and measures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter.build import build_engine
from sinkring.exporter.export import export_decoder
from sinkring.runtime import open_bundle
from sinkring.runtime.backends.cuda import Device
from sinkring.runtime.errors import SinkringError

pytestmark = pytest.mark.gpu

IDS = np.random.default_rng(0).integers(0, 97, 90)
BACKENDS = {
    "tensorrt-rtx": {"backend": "tensorrt-rtx"},
    "tensorrt-rtx, each step enqueued": {"backend": "tensorrt-rtx", "cuda_graph": False},
    "tensorrt": {"backend": "tensorrt"},
    "onnxruntime": {"backend": "onnxruntime", "device": "cuda"},
}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    try:
        found = Device("tests", extra="tensorrt-rtx")
    except SinkringError as error:
        pytest.skip(str(error))
    yield found
    found.close()


@pytest.fixture(scope="module")
def bundle(tiny_model: Path, device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows, with engines of whichever TensorRT is here and knows this GPU."""
    out = tmp_path_factory.mktemp("gpu") / "bundle"
    export_decoder(tiny_model, out, sinks=2, window=4, chunk=4, batch=2)
    return out


def run(bundle: Path, **options: Any) -> list[np.ndarray]:
    """Logits of two streams: chunks, steps of one and of both past three wraps of C = 16, a reset, and a fork that goes on alone."""
    with open_bundle(bundle, **options) as decoder:
        first, second = decoder.stream(), decoder.stream()
        logits = [first.feed(IDS[:21], all_logits=True), second.feed(IDS[:3], all_logits=True)]
        for token in IDS[21:]:
            logits += decoder.step({first: int(token)} if token % 2 else {first: int(token), second: int(token)}).values()
        second.reset()
        logits.append(second.feed(IDS[5:9]))
        second.close()
        logits.append(first.fork().feed(IDS[:3]))
    return logits


@pytest.mark.parametrize("name", BACKENDS)
def test_streams_equal_those_of_the_cpu_and_nothing_grows(bundle: Path, device: Device, name: str) -> None:
    options = BACKENDS[name]
    try:
        if options["backend"] != "onnxruntime":
            build_engine(bundle, str(options["backend"]), [device.sm])
        run(bundle, **options)
    except SinkringError as error:
        pytest.skip(str(error))
    free = device.free_bytes()
    got = run(bundle, **options)
    assert device.free_bytes() == free
    expected = run(bundle, target=None if options["backend"] == "onnxruntime" else options["backend"])
    assert max(np.ptp(logits) for logits in expected) > 1
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3, rtol=0)
