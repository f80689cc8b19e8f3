"""export_decoder with weights of 4 and 8 bits: what is stored, what runs, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sinkring.exporter.export import export_decoder
from sinkring.exporter.weight_formats import choose_weights
from sinkring.models.oracle import streaming_logits
from sinkring.models.source import load_model
from sinkring.runtime import open_bundle
from sinkring.runtime.errors import InputError, UnsupportedError
from sinkring.runtime.manifest import Manifest

from tests.models.tiny import tiny_llama
from tests.models.write_gguf import write_gguf

IDS = np.arange(3, 43)
SIZES: dict[str, Any] = {"sinks": 2, "window": 8, "chunk": 4}


def kind_of(tensor: str) -> str:
    return "Q8_0" if "embd" in tensor else "Q4_0" if "ffn_down" in tensor else "Q4_1"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama(tied=True, vocab=96), kind=kind_of)
    return path


@pytest.fixture(scope="module")
def bundle(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int4") / "bundle"
    export_decoder(gguf_file, out, weights="int4", **SIZES)
    return out


def error(bundle: Path, expected: torch.Tensor) -> float:
    """Mean |error| of all logits, as a share of the mean |logit|."""
    with open_bundle(bundle) as decoder, decoder.stream() as stream:
        found = stream.feed(IDS, all_logits=True)
    return float(np.abs(found - expected.numpy()).mean() / expected.abs().mean())


def test_a_gguf_is_taken_over_whole(gguf_file: Path, bundle: Path) -> None:
    stored = Manifest.read(bundle).weights
    assert (stored.format, stored.kept_fp32, len(stored.taken_over)) == ("int4", (), 15)
    # The blocks are the model's own numbers, so only the rounding of inputs to int8 is left.
    model = load_model(str(gguf_file)).model
    right = streaming_logits(model, torch.from_numpy(IDS), 2, 8)
    model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    wrong = streaming_logits(model, torch.from_numpy(IDS), 2, 8)
    assert error(bundle, right) < 0.05
    assert error(bundle, wrong) > 0.3


@pytest.mark.parametrize("weights", ["int8", "int8-rows"])
def test_each_row_of_a_batch_is_its_own_whatever_the_others_hold(gguf_file: Path, tmp_path: Path, weights: Any) -> None:
    export_decoder(gguf_file, tmp_path / "b2", weights=weights, batch=2, **SIZES)
    with open_bundle(tmp_path / "b2") as decoder:
        one, two = decoder.stream(), decoder.stream()
        alone = []
        for token in IDS[:12]:
            alone.append(decoder.step({one: int(token)})[one].copy())
        one.reset()
        for token, expected in zip(IDS[:12], alone, strict=True):
            np.testing.assert_array_equal(decoder.step({one: int(token), two: int(token) + 30})[one], expected)


def test_the_graphs_share_one_copy_of_the_weights(bundle: Path, gguf_file: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(bundle)
    assert {graph.target for graph in manifest.graphs} == {"onnxruntime"}
    export_decoder(gguf_file, tmp_path / "fp32", **SIZES)
    assert manifest.model.weight_bytes < Manifest.read(tmp_path / "fp32").model.weight_bytes


def test_kept_layers_are_float32(gguf_file: Path) -> None:
    loaded = load_model(str(gguf_file))
    stored = choose_weights(loaded, "int4", ["model.layers.0.*", "*.k_proj.weight"])
    assert len(stored.kept) == 8
    assert not [name for name in stored.blocks if name.startswith("model.layers.0.") or "k_proj" in name]
    # An embedding goes by the head's name, too.
    assert {"model.model.embed_tokens.weight", "model.lm_head.weight"} <= stored.by_initializer(loaded.model).keys()


def test_kept_layers_run(gguf_file: Path, tmp_path: Path) -> None:
    export_decoder(gguf_file, tmp_path / "kept", weights="int4", keep_fp32=["*.q_proj.weight", "*.o_proj.weight"], **SIZES)
    assert len(Manifest.read(tmp_path / "kept").weights.kept_fp32) == 4
    assert error(tmp_path / "kept", streaming_logits(load_model(str(gguf_file)).model, torch.from_numpy(IDS), 2, 8)) < 0.05


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"weights": "int3"}, UnsupportedError, "weights='int3' is not a format; use one of fp32, int8, int8-rows, int4"),
        ({"weights": "int4", "targets": ["tensorrt-10.3"]}, UnsupportedError, "target tensorrt-10.3 does not run them"),
        ({"keep_fp32": ["model.*"]}, InputError, "with weights fp32, which keeps all"),
        ({"weights": "int4", "keep_fp32": "model.*"}, InputError, "give a list of patterns"),
        (
            {"weights": "int4", "keep_fp32": ["no.such"]},
            InputError,
            "keep_fp32='no.such': no weight has such a name; names look like model.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(gguf_file: Path, tmp_path: Path, options: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words.replace("*", r"\*")):
        export_decoder(gguf_file, tmp_path / "out", **options, **SIZES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("weights", "dtype"), [("int4", "fp32"), ("int4", "fp16"), ("int8-rows", "fp16")])
def test_an_export_warns_of_nothing(weights: Any, dtype: str, gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        export_decoder(gguf_file, tmp_path / "bundle", weights=weights, dtype=dtype, targets=["onnxruntime"], **SIZES)
    assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == []
