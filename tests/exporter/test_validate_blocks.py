"""validate_bundle of weights in blocks: it passes on what export writes, and tells wrong weights and wrong windows apart."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from sinkring.exporter.conformance.edited_copy import copy_bundle, edit_graph
from sinkring.exporter.conformance.suite import check_conformance
from sinkring.exporter.export import export_decoder
from sinkring.exporter.validate import validate_bundle
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Manifest

from tests.models.tiny import tiny_llama
from tests.models.tiny_families import tiny_model
from tests.models.write_gguf import write_gguf

STEPS = 40


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    kinds = {"embd": "Q8_0", "output.": "Q8_0", "down": "Q4_0", "attn_v": "F32"}
    write_gguf(
        folder / "tiny.gguf",
        tiny_llama(vocab=96),
        kind=lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_1"),
    )
    export_decoder(folder / "tiny.gguf", folder / "bundle", sinks=2, window=8, chunk=4, weights="int4")
    return folder / "bundle"


def test_what_export_writes_passes(bundle: Path) -> None:
    found = validate_bundle(bundle, STEPS)
    assert found.failures == ()
    assert found.weights == "int4"
    assert [row.run.split(", ")[-1] for row in found.quantized] == ["int8 inputs", "against the fp32 model"] * 2
    rounded, original = found.quantized[:2]
    assert found.tolerance < rounded.mean_error < original.mean_error
    assert all(control.told_apart for control in found.controls)
    assert "12 matrices are the source's own blocks" in found.notes[-1]


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("o_proj.weight.values", "more than rounding to int4 explains"),
        ("up_proj.weight.and_residuals.scales", "more than the source's blocks taken over explain"),
    ],
)
def test_stored_weights_that_are_not_the_models_fail(bundle: Path, tmp_path: Path, suffix: str, words: str) -> None:
    copy = tmp_path / "wrong"
    manifest = Manifest.read(bundle)
    copy_bundle(bundle, manifest, copy)

    def spoil(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name.endswith(suffix))
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(np.roll(array, 1, axis=0) * array.dtype.type(3)), tensor.name))

    edit_graph(copy, manifest.graph("decode", "onnxruntime").path, spoil)
    assert any(words in line for line in validate_bundle(copy, STEPS).failures)


def test_the_suite_says_that_it_knows_no_rounded_inputs(bundle: Path) -> None:
    with pytest.raises(UnsupportedError, match="has weights in int4 for ONNX Runtime"):
        check_conformance(bundle)


@pytest.fixture(scope="module")
def rows_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    tiny_llama(vocab=96).save_pretrained(folder / "model")
    export_decoder(folder / "model", folder / "bundle", sinks=2, window=8, chunk=4, weights="int8-rows")
    return folder / "bundle"


def test_products_of_integers_pass(rows_bundle: Path) -> None:
    found = validate_bundle(rows_bundle, STEPS)
    assert found.failures == ()
    assert (found.weights, Manifest.read(rows_bundle).weights.form) == ("int8-rows", "rows")
    assert all(control.told_apart for control in found.controls)
    # The head rounds its inputs to one byte, the layers to two: what is left of the int4 bundle's error is small.
    assert found.quantized[0].kl_mean < 1e-3


def test_products_of_integers_with_biases_and_an_expert_that_all_share(tmp_path: Path) -> None:
    """Its products are of two dimensions; one table for both ends. In float16 weights are rounded after those to store were chosen."""
    tiny_model("qwen2_moe", num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", sinks=2, window=8, chunk=4, dtype="fp16", weights="int8-rows")
    names = "+".join(
        value.name for value in onnx.load(tmp_path / "bundle" / "decode.heads.onnx", load_external_data=False).graph.initializer
    )
    assert "self_attn.q_proj.bias" in names
    assert "shared_expert.up_proj.weight.values" in names
    found = validate_bundle(tmp_path / "bundle", STEPS)
    assert found.failures == ()
    assert all(control.told_apart for control in found.controls)
    assert found.quantized[0].kl_mean < 1e-3


@pytest.mark.parametrize("suffix", ["o_proj.weight.values", "up_proj.weight.scales"])
def test_integers_or_scales_in_anothers_place_fail(rows_bundle: Path, tmp_path: Path, suffix: str) -> None:
    copy, manifest = tmp_path / "wrong", Manifest.read(rows_bundle)
    copy_bundle(rows_bundle, manifest, copy)

    def spoil(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name.endswith(suffix))
        array = numpy_helper.to_array(tensor, base_dir=str(copy))
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(np.roll(array, 1, axis=-1)), tensor.name))

    edit_graph(copy, manifest.graph("decode", "onnxruntime").path, spoil)
    assert any("int8-rows" in line or "not the nearest" in line for line in validate_bundle(copy, STEPS).failures)
