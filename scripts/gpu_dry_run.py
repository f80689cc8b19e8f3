"""`scripts/gpu_check --dry-run`: what stands in for a GPU, its libraries, its engines and the model, so that the script is proven."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sinkring.exporter import export_decoder
from sinkring.runtime.backends import onnxruntime as cpu_backend
from sinkring.runtime.backends import onnxruntime_cuda

from tests.models.tiny import tiny_llama
from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import add_engines, install_doubles
from tests.runtime.onnxruntime_double import OrtDouble

# Rings that wrap within 16 tokens.
_GEOMETRY: dict[str, Any] = {"sinks": 2, "window": 4, "chunk": 4}


@contextmanager
def stand_ins(script: ModuleType) -> Iterator[None]:
    """While it lasts, `script` (gpu_check) exports a tiny model into a folder that goes away, and runs it on the doubles."""
    from tests.parity import test_gpu

    def export_tiny(model: Path, bundle: Path, dtype: str) -> None:
        export_decoder(model, bundle, dtype=dtype, **_GEOMETRY)

    def build_double(bundle: Path, backend: str, sms: list[int], sample_top_k: int | None = None) -> None:
        for sm in sms:
            add_engines(bundle, backend, sm, sample_top_k=sample_top_k)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        model = Path(folder) / "model"
        tiny_llama().save_pretrained(model)
        cuda = CudaDouble()
        for module in ("tensorrt", "tensorrt_rtx"):
            install_doubles(patch, cuda, module)
        double = OrtDouble(cuda)
        for backend in (cpu_backend, onnxruntime_cuda):
            patch.setattr(backend, "ort", double)
        patch.setattr(script, "MODEL", model)
        patch.setattr(script, "BUNDLES", Path(folder))
        patch.setattr(script, "BANDWIDTH_BYTES", 16 << 20)
        patch.setattr(script, "export_decoder", export_tiny)
        for module_under_test in (script, test_gpu):
            patch.setattr(module_under_test, "build_engine", build_double)
        # Pytest rewrites assertions of a module that it imports itself; this one it finds as it is.
        patch.setitem(sys.modules, "tests.parity.test_gpu", test_gpu)
        yield
