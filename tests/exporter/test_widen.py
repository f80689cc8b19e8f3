"""The graph that a CPU runs in place of a bfloat16 one: the same nodes, each computed in float32 and rounded once."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from sinkring.exporter.edited_session import run_session
from sinkring.exporter.lower import widen
from sinkring.exporter.passes.widen import ROUNDED, WIDE, WIDENED
from sinkring.runtime.bfloat16 import from_host, round_to_bfloat16
from sinkring.runtime.manifest import Manifest

from tests.exporter.tiny_bundle import shared_tiny


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_tiny(tmp_path_factory, policy="native", sinks=2, window=4, chunk=3, batch=2, dtype="bf16")


def without_casts(model: onnx.ModelProto) -> list[tuple[object, ...]]:
    """Each node of a widened graph as it was: its own casts gone, their names undone."""
    inside = {node.output[0]: node.input[0] for node in model.graph.node if node.name.endswith(WIDENED)}
    nodes = [node for node in model.graph.node if not node.name.endswith((WIDENED, ROUNDED))]
    return [
        (
            node.op_type,
            tuple(inside.get(name, name) for name in node.input),
            tuple(name.removesuffix(WIDE) for name in node.output),
            tuple(attribute.SerializeToString() for attribute in node.attribute),
        )
        for node in nodes
    ]


def plain_nodes(model: onnx.ModelProto) -> list[tuple[object, ...]]:
    return [
        (node.op_type, tuple(node.input), tuple(node.output), tuple(attribute.SerializeToString() for attribute in node.attribute))
        for node in model.graph.node
    ]


def test_taking_the_casts_out_gives_the_file_that_engines_are_built_from(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    assert {(graph.path, graph.widened) for graph in manifest.graphs} == {
        (f"{stem}.onnx", f"{stem}.widened.onnx") for stem in ("decode.heads", "decode.fused", "prefill.heads", "prefill.grouped")
    }
    for graph in manifest.graphs:
        assert graph.widened is not None
        narrow, wide = (onnx.load(bundle / path, load_external_data=False) for path in (graph.path, graph.widened))
        assert without_casts(wide) == plain_nodes(narrow)
        assert len(wide.graph.node) > len(narrow.graph.node)
        for part in ("input", "output", "initializer"):
            assert list(getattr(wide.graph, part)) == list(getattr(narrow.graph, part)), "weights included: one file for both"
        # The comparison sees a node that is another one.
        wide.graph.node[5].op_type = "Erf"
        assert without_casts(wide) != plain_nodes(narrow)


def test_every_product_is_bfloat16_for_engines_but_those_of_attention(bundle: Path) -> None:
    model = onnx.shape_inference.infer_shapes(onnx.load(bundle / "decode.fused.onnx"))
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    products = [types[node.output[0]] for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    assert products.count(TensorProto.BFLOAT16) == 2 * 4 + 1, "four a layer and the head"
    assert {types[node.output[0]] for node in model.graph.node if node.op_type == "Attention"} == {TensorProto.FLOAT}
    states = {value.name: value.type.tensor_type.elem_type for value in model.graph.input if value.name.startswith("cache")}
    assert set(states.values()) == {TensorProto.BFLOAT16}


def test_onnxruntime_rounds_once_after_adding_in_float32_and_nothing_is_optimized_away() -> None:
    """Two products in a row: the casts between them must not cancel."""
    random = np.random.default_rng(0)
    x, a, b = (round_to_bfloat16(random.normal(size=size)) for size in ((3, 64), (64, 16), (16, 5)))
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "first"),
        helper.make_node("MatMul", ["h", "b"], ["z"], "second"),
        helper.make_node("Mul", ["z", "z"], ["y"], "third"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, shape) for name, shape in (("x", [3, 64]), ("y", [3, 5]))]
    weights = [numpy_helper.from_array(array.view(ml_dtypes.bfloat16), name) for name, array in (("a", a), ("b", b))]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", values[:1], values[1:], weights), opset_imports=[helper.make_opsetid("", 24)], ir_version=10
    )
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto))
    widened = widen(model)
    assert widened is not None
    session = ort.InferenceSession(ir.to_proto(widened).SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = run_session(session, ["y"], {"x": x})
    rounded = from_host(round_to_bfloat16(wide(x) @ wide(a)), "bfloat16")
    rounded = from_host(round_to_bfloat16(rounded @ wide(b)), "bfloat16")
    expected = round_to_bfloat16(rounded * rounded)
    np.testing.assert_array_equal(got, expected)
    unrounded = (wide(x) @ wide(a) @ wide(b)) ** 2
    assert (round_to_bfloat16(unrounded) != expected).mean() > 0.2, "the roundings in between change nothing"


def wide(bits: np.ndarray) -> np.ndarray:
    return from_host(bits, "bfloat16")


def test_a_graph_without_bfloat16_arithmetic_is_not_widened(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = shared_tiny(tmp_path_factory, policy="native", sinks=2, window=4, chunk=3, cache_dtype="bf16")
    assert widen(ir.load(bundle / "decode.fused.onnx")) is None
    assert not list(bundle.glob("*.widened.onnx"))
