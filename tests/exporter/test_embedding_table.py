"""Exporting graphs that take embedded rows: when, with which table, and what cannot be asked of them."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from sinkring.exporter.build import build_engine
from sinkring.exporter.export import export_decoder
from sinkring.models.registry import families, supported_here
from sinkring.runtime.errors import InputError, UnsupportedError
from sinkring.runtime.manifest import Codebooks, Manifest

from tests.exporter.export_case import refuse_to_load
from tests.exporter.invoke_cli import invoke
from tests.models.tiny_families import VOCAB, tiny_model

WINDOWS = ["--sinks", 2, "--window", 4, "--chunk", 3]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and `bundle`, made of it by the command line; float16, and with an embedding that scales."""
    folder = tmp_path_factory.mktemp("gemma")
    tiny_model("gemma3_text").save_pretrained(folder / "model")
    ended = invoke(
        *("export", folder / "model", "--out", folder / "bundle", "--inputs", "embeddings", "--dtype", "fp16", *WINDOWS), "--json"
    )
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["manifest"]["embedding"]["rows"] == VOCAB
    return folder


def test_the_graphs_take_rows_and_hold_no_table(gemma: Path) -> None:
    manifest = Manifest.read(gemma / "bundle")
    assert (manifest.input_name, manifest.input_dtype, manifest.input_row) == ("embeddings", "float32", (32,))
    for graph in manifest.graphs:
        found = onnx.load(gemma / "bundle" / graph.path, load_external_data=False).graph
        (fed,) = [tensor.type.tensor_type for tensor in found.input if tensor.name == "embeddings"]
        assert fed.elem_type == onnx.TensorProto.FLOAT
        assert fed.shape.dim[2].dim_value == 32
        assert not [node.op_type for node in found.node if node.op_type == "Gather" and node.input[0].endswith("embed_tokens.weight")]
    assert "a step is fed" in invoke("inspect", gemma / "bundle").out


def test_the_table_has_the_model_s_factors_in_its_dtype(gemma: Path) -> None:
    table = np.load(gemma / "bundle" / "embedding.npy")
    weight = tiny_model("gemma3_text").get_input_embeddings().weight.numpy()
    assert table.dtype == np.float16
    np.testing.assert_allclose(table, weight * 32**0.5, rtol=2e-3)


def test_next_token_is_refused(gemma: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(UnsupportedError, match="next_token, and its graphs take embedded rows"):
        build_engine(gemma / "bundle", next_token=True)
    with pytest.raises(UnsupportedError, match="sample_top_k, and its graphs take embedded rows"):
        build_engine(gemma / "bundle", sample_top_k=8)


def test_an_unknown_kind_of_input_is_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(InputError, match="inputs='audio' is not known; use one of tokens, embeddings"):
        export_decoder("smollm2", tmp_path / "bundle", inputs="audio")


@pytest.mark.skipif(not supported_here(families()["kyutai_speech_to_text"]), reason="not in this transformers")
def test_a_speech_model_takes_rows_by_itself_and_nothing_else(tmp_path: Path) -> None:
    tiny_model("kyutai_speech_to_text").save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="'tokens': its steps take the codes of several audio codebooks beside the token; use "):
        export_decoder(tmp_path / "model", tmp_path / "bundle", inputs="tokens")
    manifest = export_decoder(tmp_path / "model", tmp_path / "bundle", chunk=3, targets=["onnxruntime"])
    assert manifest.embedding is not None
    assert manifest.embedding.codebooks == Codebooks(count=2, size=11, first=VOCAB, silence=VOCAB + 22)
    assert (manifest.model.vocab_size, manifest.embedding.rows) == (VOCAB, VOCAB + 23)
