"""The pass that puts DequantizeLinear in front of products and look-ups: they compute with exactly the weights that are stored."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from sinkring.exporter.engine_builder import compile_engine, load_builder
from sinkring.exporter.passes.dequantize_weights import DequantizeWeights
from sinkring.exporter.passes.insertion import replace_value
from sinkring.exporter.passes.merge_projections import MergeProjections
from sinkring.exporter.plan_kernels import read_kernels
from sinkring.exporter.quantize_symmetric import VALUE_DTYPES, SymmetricKind, SymmetricMatrix
from sinkring.runtime.backends.onnxruntime import set_common_options

from tests.exporter.test_passes_quantize import PRODUCT, THREE, TIED, K, N, V, ops, parse

RNG = np.random.default_rng(0)
KINDS: list[SymmetricKind] = ["int4", "int8", "fp8"]


def matrix(rows: int, kind: SymmetricKind, inputs: int = K) -> SymmetricMatrix:
    block = 32 if kind == "int4" else inputs
    values = RNG.integers(-8, 8, (rows, inputs)).astype(VALUE_DTYPES[kind])
    return SymmetricMatrix(kind, block, values, RNG.random((rows, inputs // block), np.float32) + 0.1)


def by_hand(stored: SymmetricMatrix) -> np.ndarray:
    """float64 [N,K], each weight's scale picked by its column."""
    scales = stored.scales[:, np.arange(stored.values.shape[1]) // stored.block]
    return stored.values.astype(np.float64) * scales


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    set_common_options(options)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options).run(None, feeds)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_products_are_those_of_the_stored_weights(kind: SymmetricKind) -> None:
    stored = {name: matrix(N, kind) for name in ("w", "w2", "w3")}
    model = parse(THREE, {f"{name}.transposed": by_hand(one).T.astype(np.float32) for name, one in stored.items()})
    MergeProjections()(model)
    DequantizeWeights(stored)(model)
    assert ops(model) == (["DequantizeLinear", "MatMul", "Split"] if kind == "int4" else ["DequantizeLinear", "MatMul", "Mul", "Split"])
    x = RNG.standard_normal((1, 3, K)).astype(np.float32)
    for found, one in zip(run(model, {"x": x}), stored.values(), strict=True):
        expected = x.astype(np.float64) @ by_hand(one).T
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        # The smallest step of one weight is far outside that.
        assert np.abs(x).min(1).max() * one.scales.min() > 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_table_is_stored_once(kind: SymmetricKind) -> None:
    stored, ids = matrix(V, kind), np.array([[9, 0], [3, 9]])
    model = parse(TIED, {"table": by_hand(stored).astype(np.float32)})
    DequantizeWeights({"table": stored})(model)
    assert ops(model).count("DequantizeLinear") == 1
    x = RNG.standard_normal((3, K)).astype(np.float32)
    logits, rows = run(model, {"x": x, "ids": ids})
    np.testing.assert_allclose(rows, by_hand(stored)[ids], rtol=1e-6)
    np.testing.assert_allclose(logits, x.astype(np.float64) @ by_hand(stored).T, rtol=0, atol=1e-4)


def test_what_is_not_stored_so_is_left_alone() -> None:
    model = parse(PRODUCT, {"w.transposed": RNG.standard_normal((K, N)).astype(np.float32)})
    DequantizeWeights({"other": matrix(N, "int4")})(model)
    assert ops(model) == ["MatMul"]


def test_graphs_as_text() -> None:
    """The smallest graphs as text, so that a change of the pass shows in review."""
    texts = []
    for kind in ("int4", "int8"):
        stored = matrix(N, kind)  # type: ignore[arg-type]
        model = parse(PRODUCT, {"w.transposed": by_hand(stored).T.astype(np.float32)})
        DequantizeWeights({"w": stored})(model)
        body = onnx.printer.to_text(ir.to_proto(model)).split("{", 2)[-1]
        texts.append([line.strip().split("] ", 1)[-1] for line in body.splitlines() if "(" in line])
    assert texts == [
        ['val_0 = DequantizeLinear <axis: int = 0, block_size: int = 32> ("w.values", "w.scales")', "y = MatMul (x, val_0)"],
        ['val_0 = DequantizeLinear ("w.values", "w.scales")', "val_1 = MatMul (x, val_0)", 'y = Mul (val_1, "w.ratios")'],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_builder_fuses_the_product_of_one_token(kind: SymmetricKind, tmp_path: object) -> None:
    """No kernel without inputs, which would write the whole weight in float16 at every step; one scale a row does just that."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    stored = matrix(2304, kind, 576)
    stored = SymmetricMatrix(kind, stored.block, stored.values, stored.scales.astype(np.float16).astype(np.float32))
    text = """<ir_version: 10, opset_import: ["": 24]>
    g (float16[1,1,576] x, float16[576,2304] w) => (float16[1,1,2304] y) { y = MatMul(x, w) }"""

    def standalone(model: ir.Model) -> list[str]:
        path = tmp_path / "g.onnx"  # type: ignore[operator]
        ir.save(model, path)
        trt = load_builder("tensorrt-rtx")
        return [kernel.name for kernel in read_kernels(compile_engine(trt, "tensorrt-rtx", path, 89, {}).plan_text) if not kernel.inputs]

    model = parse(text, {"w.transposed": by_hand(stored).T.astype(np.float16)})
    DequantizeWeights({"w": stored})(model)
    assert standalone(model) == []
    if kind != "int4":
        # The control: the scales of the rows where the operator has a place for them.
        dequantize, product, ratio = model.graph
        scales = ir.Value(name="s", shape=ir.Shape((2304,)), type=ir.TensorType(ir.DataType.FLOAT16))
        scales.const_value = ir.tensor(stored.scales[:, 0].astype(np.float16), name="s")
        model.graph.register_initializer(scales)
        dequantize.replace_input_with(1, scales)
        dequantize.attributes["axis"] = ir.AttrInt64("axis", 1)
        replace_value(ratio.outputs[0], product.outputs[0])
        model.graph.remove(ratio, safe=True)
        assert len(standalone(model)) == 1


def test_a_scale_below_float16_keeps_its_digits() -> None:
    """Of tiny weights: the scale of all rows is no subnormal number, and what is left of it is in the ratios."""
    stored = matrix(N, "fp8")
    tiny = SymmetricMatrix("fp8", K, stored.values, stored.scales * np.float32(1e-5))
    text = f"""<ir_version: 10, opset_import: ["": 24]>
    g (float16[1,3,{K}] x, float16[{K},{N}] w) => (float16[1,3,{N}] y) {{ y = MatMul(x, w) }}"""
    model = parse(text, {"w.transposed": by_hand(tiny).T.astype(np.float16)})
    DequantizeWeights({"w": tiny})(model)
    initializers = {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value is not None}
    assert initializers["w.scales"] >= ml_dtypes.finfo(np.float16).tiny
    restored = initializers["w.scales"].astype(np.float64) * initializers["w.ratios"]
    np.testing.assert_allclose(restored, tiny.scales[:, 0], rtol=2e-3)
