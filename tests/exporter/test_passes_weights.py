"""The passes that rearrange weights and layouts: each keeps what the graph computes, and does what it says."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from sinkring.exporter.passes.merge_projections import MergeProjections
from sinkring.exporter.passes.tied_head import TiedHeadToGemm
from sinkring.exporter.passes.transpose_weights import StoreWeightsTransposed
from sinkring.exporter.passes.unit_transposes import UnitTransposesToReshapes

RNG = np.random.default_rng(0)
W = RNG.standard_normal((6, 4)).astype(np.float32)
W2 = RNG.standard_normal((5, 4)).astype(np.float32)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
HEADS = RNG.standard_normal((2, 1, 3, 4)).astype(np.float32)

TWO_PROJECTIONS = """<ir_version: 10, opset_import: ["": 24]>
g (float[2,3,4] x, float[4,6] w, float[4,5] w2) => (float[2,3,6] a, float[2,3,5] b) { a = MatMul(x, w)  b = MatMul(x, w2) }"""
TIED = """<ir_version: 10, opset_import: ["": 24]>
g (float[2,3,4] x, int64[2] ids, float[6,4] w) => (float[2,3,6] y, float[2,4] rows) {
  rows = Gather(w, ids)  t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }"""
UNTIED = """<ir_version: 10, opset_import: ["": 24]>
g (float[2,3,4] x, float[6,4] w) => (float[2,3,6] y) { t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t) }"""
LEFT = """<ir_version: 10, opset_import: ["": 24]>
g (int64[2] ids, float[6,4] w) => (float[2,4] rows) { t = Transpose<perm=[0,1]>(w)  rows = Gather(t, ids) }"""
UNIT = """<ir_version: 10, opset_import: ["": 24]>
g (float[2,1,3,4] x) => (float[2,3,1,4] y) { y = Transpose<perm=[0,2,1,3]>(x) }"""
NO_UNIT = """<ir_version: 10, opset_import: ["": 24]>
g (float[2,1,3,4] x) => (float[2,1,4,3] y) { y = Transpose<perm=[0,1,3,2]>(x) }"""


def parse(text: str, weights: dict[str, np.ndarray]) -> ir.Model:
    model = ir.from_onnx_text(text)
    for value in list(model.graph.inputs):
        if value.name in weights:
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(weights[value.name], name=value.name)
            model.graph.register_initializer(value)
    return model


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, feeds)


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(
    ("text", "weights", "feeds", "apply", "expected"),
    [
        (TWO_PROJECTIONS, {"w": W.T.copy(), "w2": W2.T.copy()}, {"x": X}, MergeProjections(), ["MatMul", "Split"]),
        (TIED, {"w": W}, {"x": X, "ids": np.array([4, 0])}, TiedHeadToGemm(), ["Gather", "Reshape", "Gemm", "Reshape"]),
        (UNTIED, {"w": W}, {"x": X}, StoreWeightsTransposed(), ["MatMul"]),
        (UNIT, {}, {"x": HEADS}, UnitTransposesToReshapes(), ["Reshape"]),
    ],
    ids=["merge", "tied", "transpose", "unit"],
)
def test_a_pass_changes_the_form_and_not_the_result(
    text: str, weights: dict[str, np.ndarray], feeds: dict[str, np.ndarray], apply: Callable[[ir.Model], object], expected: list[str]
) -> None:
    before = run(parse(text, weights), feeds)
    model = parse(text, weights)
    apply(model)
    assert ops(model) == expected
    for old, new in zip(before, run(model, feeds), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "weights", "apply"),
    [
        (TIED, {"w": W}, StoreWeightsTransposed()),
        (LEFT, {"w": W}, StoreWeightsTransposed()),
        (NO_UNIT, {}, UnitTransposesToReshapes()),
        (UNTIED, {"w": W}, MergeProjections()),
    ],
    ids=["a tied weight is not stored twice", "axes that stay in their order", "an axis longer than 1 moves", "one projection alone"],
)
def test_a_pass_leaves_alone_what_it_is_not_for(text: str, weights: dict[str, np.ndarray], apply: Callable[[ir.Model], object]) -> None:
    model = parse(text, weights)
    before = ops(model)
    apply(model)
    assert ops(model) == before


def test_a_stored_transpose_is_made_only_when_it_is_read() -> None:
    model = parse(UNTIED, {"w": W})
    StoreWeightsTransposed()(model)
    (weight,) = model.graph.initializers.values()
    assert isinstance(weight.const_value, ir.LazyTensor)
    np.testing.assert_array_equal(weight.const_value.numpy(), W.T)
