"""A bundle with engines that the doubles of TensorRT and CUDA can run."""

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest
from sinkring.exporter.sampling_head import append_sampling_head
from sinkring.runtime.manifest import MANIFEST_NAME, Engine, File, Manifest

from tests.runtime.cuda_double import CudaDouble
from tests.runtime.tensorrt_double import TensorRtDouble, real

VERSION = real.__version__


def with_engines(
    bundle: Path,
    out: Path,
    target: str = "tensorrt-rtx",
    sm: int = 89,
    version: str = VERSION,
    next_token: bool = False,
    sample_top_k: int | None = None,
) -> Path:
    """A copy of `bundle` in `out` with an engine for each graph of `target`, as `build_engine` records them.

    next_token: the decode engine has that output; sample_top_k: it has a sampling head.
    """
    shutil.copytree(bundle, out)
    return add_engines(out, target, sm, version, next_token, sample_top_k)


def add_engines(
    out: Path, target: str, sm: int = 89, version: str = VERSION, next_token: bool = False, sample_top_k: int | None = None
) -> Path:
    """As `with_engines`, into the bundle itself."""
    manifest = Manifest.read(out)
    engines, files = list(manifest.engines), []
    (out / "engines").mkdir(exist_ok=True)
    for graph in manifest.graphs_for(target):
        onnx_path, top_k = out / graph.cpu_path, sample_top_k if graph.role == "decode" else None
        if top_k:
            onnx_path = out / "decode.headed.onnx"
            headed = append_sampling_head(onnx.load(out / graph.cpu_path, load_external_data=False), top_k)
            onnx_path.write_bytes(headed.SerializeToString())
        stem = f"engines/{target}-{version}-sm{sm}-fp32/{graph.role}"
        (out / stem).parent.mkdir(exist_ok=True)
        contents = {
            f"{stem}.engine": {
                "role": graph.role,
                "onnx": str(onnx_path),
                "next_token": next_token and graph.role == "decode",
            },
            f"{stem}.json": {"contract": manifest.contract(graph.update), "sample_top_k": top_k},
        }
        for path, content in contents.items():
            raw = json.dumps(content).encode()
            (out / path).write_bytes(raw)
            files.append(File(path, len(raw), hashlib.sha256(raw).hexdigest()))
        sha256 = manifest.file(graph.path).sha256
        engines.append(Engine(graph.role, target, sm, f"{stem}.engine", version, graph.path, sha256, f"{stem}.json"))
    manifest = dataclasses.replace(manifest, engines=tuple(engines), files=(*manifest.files, *files))
    (out / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return out


def install_doubles(monkeypatch: pytest.MonkeyPatch, cuda: CudaDouble, module: str = "tensorrt_rtx") -> TensorRtDouble:
    """Until the end of the test, importing TensorRT and cuda-python gives the doubles."""
    trt = TensorRtDouble(cuda)
    monkeypatch.setitem(sys.modules, module, trt)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    return trt
