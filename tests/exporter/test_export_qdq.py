"""Weights of 4 and 8 bits for engines: what export writes, what validate and the suite make of it, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from sinkring.exporter import check_conformance
from sinkring.exporter.compare_weights import compare_weights
from sinkring.exporter.conformance.edited_copy import copy_bundle, edit_graph
from sinkring.exporter.export import export_decoder
from sinkring.exporter.validate import validate_bundle
from sinkring.runtime.errors import InputError, UnsupportedError
from sinkring.runtime.manifest import Manifest

from tests.models.tiny import tiny_llama
from tests.models.tiny_families import find_row, tiny_model

SIZES: dict[str, Any] = {"sinks": 2, "window": 6, "chunk": 3, "targets": ["tensorrt-rtx"]}
STEPS = 24
ODD, TIED = "int4, odd sizes", "int8, tied, fp16"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of 64, a multiple of both block sizes, of 96, a multiple of the smaller one, and of 40 and 72, of none."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(heads=8, kv_heads=2, intermediate_size=72, vocab=97, std=0.2).save_pretrained(folder / "odd")
    tiny_llama(tied=True, std=0.2).save_pretrained(folder / "tied")
    return folder


@pytest.fixture(scope="module")
def bundles(model: Path) -> dict[str, Path]:
    export_decoder(model / "odd", model / "int4", weights="int4", keep_fp32=["*.layers.0.self_attn.o_proj.weight"], **SIZES)
    export_decoder(model / "tied", model / "int8", weights="int8", dtype="fp16", **SIZES)
    return {ODD: model / "int4", TIED: model / "int8"}


def nodes(bundle: Path, op: str) -> list[ir.Node]:
    manifest = Manifest.read(bundle)
    return [node for node in ir.load(bundle / manifest.graph("decode", "tensorrt-rtx").path).graph if node.op_type == op]


def test_int4_has_blocks_where_they_fit_and_the_rest_stays(bundles: dict[str, Path]) -> None:
    stored = Manifest.read(bundles[ODD]).weights
    assert (stored.form, stored.format, stored.taken_over) == ("qdq", "int4", ())
    down = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    assert sorted(stored.kept_fp32) == sorted([*down, "model.layers.0.self_attn.o_proj.weight"])
    found = nodes(bundles[ODD], "DequantizeLinear")
    # Embedding, head, and of each layer the merged projections of attention and of the MLP, of one also that behind attention.
    assert len(found) == 2 + 2 + 2 + 1
    assert {node.inputs[0].dtype for node in found if node.inputs[0] is not None} == {ir.DataType.INT4}
    assert {node.attributes["block_size"].as_int() for node in found} == {32}


def test_scales_are_below_zero_only_where_every_target_takes_them(bundles: dict[str, Path], model: Path, tmp_path: Path) -> None:
    export_decoder(model / "odd", tmp_path / "both", weights="int4", **(SIZES | {"targets": ["tensorrt-rtx", "tensorrt"]}))
    for bundle, mixed in ((bundles[ODD], True), (tmp_path / "both", False)):
        scales = np.concatenate([node.inputs[1].const_value.numpy().ravel() for node in nodes(bundle, "DequantizeLinear")])  # type: ignore[union-attr]
        assert np.any(scales > 0)
        assert bool(np.any(scales < 0)) is mixed


def test_a_tied_table_is_stored_once_and_a_scale_is_as_wide_as_what_it_scales(bundles: dict[str, Path]) -> None:
    found = nodes(bundles[TIED], "DequantizeLinear")
    (table,) = [node for node in found if {user.op_type for user, _ in node.outputs[0].uses()} == {"Gather", "Gemm"}]
    assert len(found) == 1 + 2 * 4
    assert table.inputs[1] is not None
    assert table.inputs[1].dtype == ir.DataType.FLOAT16


@pytest.mark.parametrize("name", [ODD, TIED])
def test_what_export_writes_is_proven_in_onnx_runtime(bundles: dict[str, Path], name: str) -> None:
    found = validate_bundle(bundles[name], STEPS)
    assert found.failures == ()
    assert found.weights in name
    assert all(control.told_apart for control in found.controls)
    assert [row.run.rsplit(", ", 1)[-1] for row in found.quantized] == ["against the model"] * 2
    assert found.quantized[0].mean_error > 3 * max(row.mean_error for row in found.regions)


@pytest.mark.parametrize("name", [ODD, TIED])
def test_a_scale_in_its_neighbours_place_is_noticed(bundles: dict[str, Path], name: str, tmp_path: Path) -> None:
    result = check_conformance(bundles[name], only=["I3"], sabotage="scale-shifted")
    assert [check.passed for check in result.checks] == [False]
    # `validate` takes the weights from the decode graph, so there it is the stored numbers themselves that are wrong.
    copy, manifest = tmp_path / "wrong", Manifest.read(bundles[name])
    copy_bundle(bundles[name], manifest, copy)

    def shift(graph: onnx.ModelProto) -> None:
        suffix = "q_proj.weight+model.model.layers.1.self_attn.k_proj.weight+model.model.layers.1.self_attn.v_proj.weight"
        last = ".ratios" if name == TIED else ".scales"
        tensor = next(tensor for tensor in graph.graph.initializer if tensor.name.endswith(suffix + last))
        array = numpy_helper.to_array(tensor, base_dir=str(copy))
        tensor.CopyFrom(numpy_helper.from_array(np.roll(array, 1, -1), tensor.name))

    edit_graph(copy, manifest.graph("decode", "tensorrt-rtx").path, shift)
    wrong = [line for line in validate_bundle(copy, 4).failures if "scales or values are in another one's place" in line]
    assert len(wrong) == 3
    assert "model.layers.1.self_attn.q_proj.weight" in wrong[0]


def test_the_suite_holds_for_quantized_weights(bundles: dict[str, Path]) -> None:
    result = check_conformance(bundles[ODD], only=["I3", "I10", "I12"])
    assert result.passed, [check for check in result.checks if check.passed is False]


def test_quality_is_compared_with_the_graphs_that_are_there(bundles: dict[str, Path], model: Path) -> None:
    """fp8 is for engines without being told."""
    export_decoder(model / "odd", model / "fp8", weights="fp8", sinks=2, window=6, chunk=3)
    assert {graph.target for graph in Manifest.read(model / "fp8").graphs} == {"tensorrt", "tensorrt-rtx"}
    found = compare_weights(bundles[ODD], model / "fp8", tokens=32)
    assert (found.reference.weights, found.compared.weights) == ("fp8", "int4")
    assert 1e-6 < found.compared.kl < 1


@pytest.mark.parametrize(("row", "weights", "kept"), [("qwen2", "fp8", ()), ("mixtral", "int8", ())])
def test_families_with_biases_and_experts(row: str, weights: Any, kept: tuple[str, ...], tmp_path: Path) -> None:
    """Biases are added behind the products; experts, which lie in one stacked weight, stay as they are."""
    tiny_model(find_row(row)).save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", weights=weights, **SIZES)
    assert Manifest.read(tmp_path / "bundle").weights.kept_fp32 == kept
    assert validate_bundle(tmp_path / "bundle", STEPS).failures == ()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"weights": "fp8", "targets": ["onnxruntime"]},
            UnsupportedError,
            "target onnxruntime does not run them; use weights fp32, or: tensorrt-rtx",
        ),
        ({"weights": "int4", "targets": ["onnxruntime", "tensorrt"]}, UnsupportedError, "in different forms; export a bundle for each"),
        ({"weights": "int4", "targets": ["tensorrt"], "block": 16}, InputError, "block=16 with weights int4: give one of 32, 64, 128"),
        ({"weights": "int8", "targets": ["tensorrt"], "block": 64}, InputError, "block=64 with weights int8"),
        ({"weights": "int4", "block": 64}, InputError, "whose blocks have 32 weights: leave it out"),
        ({"weights": "int4", "targets": ["tensorrt"], "keep_fp32": ["no.such"]}, InputError, "no weight has such a name"),
    ],
)
def test_what_makes_no_sense_is_refused(model: Path, tmp_path: Path, options: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        export_decoder(model / "tied", tmp_path / "out", **{"sinks": 2, "window": 6, "chunk": 3, **options})
    assert not (tmp_path / "out").exists()
