"""docs/engines.md: each refusal on it, provoked, says what the page says."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from sinkring.exporter.bundle_writer import describe_file
from sinkring.runtime import open_bundle
from sinkring.runtime.errors import SinkringError
from sinkring.runtime.manifest import MANIFEST_NAME, Manifest

from tests.conftest import ROOT
from tests.exporter.hand_bundle import ring_graph, write_bundle
from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines
from tests.runtime.tensorrt_double import TensorRtDouble

PAGE = ROOT / "docs" / "engines.md"


def same_words(text: str) -> str:
    """Without what differs from one builder, graph or machine to the next: versions, hashes, generated names, sizes in hex."""
    text = re.sub(r"\b\d+\.\d+\.\d+(\.\d+)?\b", "V", text)
    text = re.sub(r"\b[0-9a-f]{12}\.\.\.", "H", text)
    text = re.sub(r"__my\w+", "K", text)
    return " ".join(text.replace("`", "").split())


def edit(bundle: Path, change: Callable[[Manifest], Manifest]) -> None:
    (bundle / MANIFEST_NAME).write_text(change(Manifest.read(bundle)).to_json(), encoding="utf-8")


def build(bundle: Path, sm: int = 89) -> None:
    from sinkring.exporter.build import build_engine

    build_engine(bundle, sm=[sm])


def circular_scatter(folder: Path, _: Path) -> None:
    bundle = write_bundle(folder, {"decode": ring_graph()})
    model = onnx.load(bundle / "decode.onnx", load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "TensorScatter" and attribute.name == "mode":
                attribute.s = b"circular"
    (bundle / "decode.onnx").write_bytes(model.SerializeToString())
    described = describe_file(bundle, "decode.onnx")
    edit(bundle, lambda made: dataclasses.replace(made, files=tuple(described if f.path == "decode.onnx" else f for f in made.files)))
    build(bundle)


def scale_one(folder: Path, _: Path) -> None:
    build(write_bundle(folder, {"decode": ring_graph(scale=1.0)}))


def unknown_sm(folder: Path, _: Path) -> None:
    build(write_bundle(folder, {"decode": ring_graph()}), sm=90)


def bfloat16_on_turing(folder: Path, _: Path) -> None:
    bundle = write_bundle(folder, {"decode": ring_graph()})
    edit(bundle, lambda made: dataclasses.replace(made, dtype="bfloat16"))
    build(bundle, sm=75)


@pytest.mark.parametrize("provoke", [circular_scatter, scale_one, unknown_sm, bfloat16_on_turing])
def test_what_build_refuses(provoke: Callable[[Path, Path], None], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(SinkringError) as caught:
        provoke(tmp_path / "bundle", tmp_path)
    assert same_words(str(caught.value)) in same_words(PAGE.read_text(encoding="utf-8")), str(caught.value)


@pytest.fixture
def cuda() -> CudaDouble:
    return CudaDouble()


@pytest.fixture
def trt(cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> TensorRtDouble:
    return install_doubles(monkeypatch, cuda)


def unbound_alias(bundle: Path, trt: TensorRtDouble) -> None:
    trt.faults[("alias", "cache.0.k.updated")] = None


def other_graph(bundle: Path, _: TensorRtDouble) -> None:
    engines = tuple(dataclasses.replace(engine, graph_sha256="ab" * 32) for engine in Manifest.read(bundle).engines)
    edit(bundle, lambda made: dataclasses.replace(made, engines=engines))


def other_version(bundle: Path, _: TensorRtDouble) -> None:
    engines = tuple(dataclasses.replace(engine, builder_version="1.0.0") for engine in Manifest.read(bundle).engines)
    edit(bundle, lambda made: dataclasses.replace(made, engines=engines))


def other_gpu(_: Path, trt: TensorRtDouble) -> None:
    trt.cuda.sm = 120


def past_the_end(_bundle: Path, _trt: TensorRtDouble) -> None:
    """Nothing is wrong with the engine: the write is."""


@pytest.mark.parametrize("provoke", [unbound_alias, other_graph, other_version, other_gpu, past_the_end])
def test_what_loading_and_running_refuse(
    provoke: Callable[[Path, TensorRtDouble], None], tiny_bundle: Path, tmp_path: Path, trt: TensorRtDouble
) -> None:
    bundle = with_engines(tiny_bundle, tmp_path / "bundle")
    provoke(bundle, trt)
    with pytest.raises(SinkringError) as caught, open_bundle(bundle, "tensorrt-rtx", verify=False) as decoder:
        decoder.backend.prefill(0, np.arange(4), 0, (13,), 1)
    assert same_words(str(caught.value)) in same_words(PAGE.read_text(encoding="utf-8")), str(caught.value)
