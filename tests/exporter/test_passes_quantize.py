"""The passes that put quantized operators in: ONNX Runtime then computes with exactly the weights that the blocks stand for."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from sinkring.exporter.passes.merge_projections import MergeProjections
from sinkring.exporter.passes.quantize_projections import QuantizeProjections
from sinkring.exporter.passes.quantize_table import QuantizeTable
from sinkring.exporter.quantize import BLOCK, BlockMatrix
from sinkring.exporter.stored_weights import put_exact_products

RNG = np.random.default_rng(0)
K, N, V = 2 * BLOCK, 6, 10
PRODUCT = f"""<ir_version: 10, opset_import: ["": 24]>
g (float[1,3,{K}] x, float[{K},{N}] w) => (float[1,3,{N}] y) {{ y = MatMul(x, w) }}"""
THREE = f"""<ir_version: 10, opset_import: ["": 24]>
g (float[1,3,{K}] x, float[{K},{N}] w, float[{K},{N}] w2, float[{K},{N}] w3) => (float[1,3,{N}] a, float[1,3,{N}] b, float[1,3,{N}] c) {{
  a = MatMul(x, w)  b = MatMul(x, w2)  c = MatMul(x, w3) }}"""
TIED = f"""<ir_version: 10, opset_import: ["": 24]>
g (float[3,{K}] x, int64[2,2] ids, float[{V},{K}] table) => (float[3,{V}] y, float[2,2,{K}] rows) {{
  rows = Gather(table, ids)  y = Gemm<transB=1>(x, table) }}"""


def blocks(rows: int, bits: int, residuals: bool = False) -> BlockMatrix:
    return BlockMatrix(
        bits,
        RNG.integers(0, 1 << bits, (rows, K), dtype=np.uint8),
        RNG.random((rows, K // BLOCK), np.float32) - 0.5,
        RNG.integers(0, 1 << bits, (rows, K // BLOCK), dtype=np.uint8),
        RNG.random((rows, K // BLOCK), np.float32) if residuals else None,
    )


def inputs() -> np.ndarray:
    """Whole numbers with 127 in each block, which level 4 of accuracy, int8, does not round."""
    x = RNG.integers(-127, 128, (1, 3, K)).astype(np.float32)
    x[:, :, ::BLOCK] = 127
    return x


def parse(text: str, weights: dict[str, np.ndarray]) -> ir.Model:
    model = ir.from_onnx_text(text)
    for value in list(model.graph.inputs):
        if value.name in {name.split(".")[0] for name in weights}:
            model.graph.inputs.remove(value)
            value.name = next(name for name in weights if name.split(".")[0] == value.name)
            value.const_value = ir.tensor(weights[value.name], name=value.name)
            model.graph.register_initializer(value)
    return model


def run(model: ir.Model, feeds: dict[str, np.ndarray], exact: bool = False) -> list[np.ndarray]:
    """exact: with inputs that are not rounded to int8."""
    proto = ir.to_proto(model)
    if exact:
        put_exact_products(proto)
    return ort.InferenceSession(proto.SerializeToString()).run(None, feeds)


def assert_of_residuals(found: np.ndarray, exact: np.ndarray, x: np.ndarray, matrix: BlockMatrix) -> None:
    """Both products of `x` [...,K] with blocks that have residuals: as near as two digits of those, and sums of inputs in int8, allow."""
    assert matrix.residuals is not None
    sums = np.abs(x.astype(np.float64).reshape(*x.shape[:-1], -1, BLOCK).sum(axis=-1))
    spread = np.ptp(np.pad(matrix.residuals, ((0, 0), (0, 1))), axis=1)
    of_digits = sums.sum(axis=-1)[..., None] * spread / ((1 << matrix.bits) - 1) ** 2
    of_int8 = sums.max(axis=-1)[..., None] / 254 * np.abs(matrix.residuals).sum(axis=1)
    expected = x.astype(np.float64) @ matrix.dequantized().T.astype(np.float64)
    rounding = 1e-5 * np.abs(expected).max()
    assert (np.abs(exact - expected) <= of_digits + rounding).all()
    assert (np.abs(found - expected) <= of_digits + of_int8 + rounding).all()
    # Without the residuals, or with one digit of 4 bits, it is far outside that.
    without = sums[..., None, :] * np.abs(matrix.residuals)
    assert without.sum() > 50 * (of_digits + rounding).sum()


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_that_of_the_blocks(bits: int) -> None:
    matrix, x = blocks(N, bits), inputs()
    model = parse(PRODUCT, {"w.transposed": matrix.dequantized().T.copy()})
    QuantizeProjections({"w": matrix})(model)
    assert ops(model) == ["MatMulNBits"]
    expected = x.astype(np.float64) @ matrix.dequantized().T.astype(np.float64)
    (found,) = run(model, {"x": x})
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)
    # One value of one block off by one is far outside that.
    assert np.abs(x.min() * matrix.scales).max() > 1e-4 * scale


@pytest.mark.parametrize("bits", [4, 8])
def test_residuals_are_weights_of_the_blocks_sums(bits: int) -> None:
    matrix, x = blocks(N, bits, residuals=True), inputs()
    model = parse(PRODUCT, {"w.transposed": matrix.dequantized().T.copy()})
    QuantizeProjections({"w": matrix})(model)
    assert ops(model) == ["Reshape", "ReduceSum", "Concat", "MatMulNBits"]
    assert_of_residuals(*run(model, {"x": x}), *run(model, {"x": x}, exact=True), x, matrix)


def test_merged_products_keep_their_own_blocks_and_one_stays_apart() -> None:
    first, second, x = blocks(N, 4, residuals=True), blocks(N, 4), inputs()
    third = RNG.standard_normal((K, N)).astype(np.float32)
    floats = {"w.transposed": first.dequantized().T.copy(), "w2.transposed": second.dequantized().T.copy(), "w3.transposed": third}
    model = parse(THREE, floats)
    chosen = {"w": first, "w2": second}
    MergeProjections(lambda name: name.removesuffix(".transposed") in chosen)(model)
    QuantizeProjections(chosen)(model)
    assert ops(model).count("MatMulNBits") == 1
    found, exact = run(model, {"x": x}), run(model, {"x": x}, exact=True)
    assert_of_residuals(found[0], exact[0], x, first)
    for got, weight in list(zip(found, floats.values(), strict=True))[1:]:
        expected = x.astype(np.float64) @ weight.astype(np.float64)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tied_table_is_looked_up_and_multiplied_with(bits: int) -> None:
    matrix, x, ids = blocks(V, bits), inputs()[0], np.array([[9, 0], [3, 9]])
    model = parse(TIED, {"table": matrix.dequantized()})
    for apply in (QuantizeProjections({"table": matrix}), QuantizeTable({"table": matrix})):
        apply(model)
    assert sorted(ops(model)) == ["GatherBlockQuantized", "MatMulNBits"]
    logits, rows = run(model, {"x": x, "ids": ids})
    np.testing.assert_array_equal(rows, matrix.dequantized()[ids])
    expected = x @ matrix.dequantized().T
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # Told apart by content, the values of both are stored once.
    stored = {value.const_value.numpy().tobytes() for value in model.graph.initializers.values() if value.const_value is not None}
    assert len(stored) == 3


@pytest.mark.parametrize("residuals", [False, True])
def test_a_float16_product_is_one_of_float32(residuals: bool) -> None:
    matrix, x = blocks(N, 4, residuals), inputs()
    model = parse(PRODUCT.replace("float[", "float16["), {"w.transposed": matrix.dequantized().T.astype(np.float16)})
    QuantizeProjections({"w": matrix})(model)
    float_model = parse(PRODUCT, {"w.transposed": matrix.dequantized().T.copy()})
    QuantizeProjections({"w": matrix})(float_model)
    (found,), (expected,) = run(model, {"x": x.astype(np.float16)}), run(float_model, {"x": x})
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, expected.astype(np.float16))
    if not residuals:
        of_blocks = x @ matrix.dequantized().T
        np.testing.assert_allclose(found, of_blocks, rtol=2.0**-11, atol=1e-5 * np.abs(of_blocks).max())


def test_merged_float16_products() -> None:
    weights, x = {name: blocks(N, 4) for name in ("w", "w2", "w3")}, inputs()
    floats = {f"{name}.transposed": matrix.dequantized().T.astype(np.float16) for name, matrix in weights.items()}
    model = parse(THREE.replace("float[", "float16["), floats)
    MergeProjections()(model)
    QuantizeProjections(weights)(model)
    for got, matrix in zip(run(model, {"x": x.astype(np.float16)}), weights.values(), strict=True):
        expected = x @ matrix.dequantized().T
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, expected, rtol=2.0**-11, atol=1e-5 * np.abs(expected).max())


def test_a_float16_table_is_looked_up_in_float16() -> None:
    matrix, x, ids = blocks(V, 8), inputs()[0], np.array([[9, 0], [3, 9]])
    model = parse(TIED.replace("float[", "float16["), {"table": matrix.dequantized().astype(np.float16)})
    for apply in (QuantizeProjections({"table": matrix}), QuantizeTable({"table": matrix})):
        apply(model)
    logits, rows = run(model, {"x": x.astype(np.float16) / 64, "ids": ids})
    assert logits.dtype == rows.dtype == np.float16
    np.testing.assert_array_equal(rows, matrix.dequantized()[ids].astype(np.float16))


def test_what_is_not_quantized_is_left_alone() -> None:
    model = parse(PRODUCT, {"w.transposed": RNG.standard_normal((K, N)).astype(np.float32)})
    QuantizeProjections({"other": blocks(N, 4)})(model)
    QuantizeTable({"other": blocks(N, 4)})(model)
    assert ops(model) == ["MatMul"]
    assert set(model.opset_imports) == {""}


def test_graph_as_text() -> None:
    """The smallest graph as text, so that a change of the pass shows in review."""
    matrix = blocks(N, 4, residuals=True)
    model = parse(PRODUCT, {"w.transposed": matrix.dequantized().T.copy()})
    QuantizeProjections({"w": matrix})(model)
    body = onnx.printer.to_text(ir.to_proto(model)).split("{", 2)[-1]
    lines = [line.split("] ", 1)[1] for line in body.splitlines() if "] " in line and "node_" in line]
    assert lines == [
        'val_0 = Reshape (x, "i64.0.0.2.32")',
        'val_1 = ReduceSum <keepdims: int = 0> (val_0, "i64.-1")',
        "val_2 = Concat <axis: int = -1> (x, " + ", ".join(["val_1"] * 17) + ")",
        "y = com.microsoft.MatMulNBits <K: int = 98, N: int = 6, bits: int = 4, block_size: int = 32, accuracy_level: int = 4>"
        ' (val_2, "w.and_residuals.values", "w.and_residuals.scales", "w.and_residuals.zero_points")',
    ]
