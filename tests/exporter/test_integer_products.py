"""Products of integers: the numbers that a product of floats with the stored weights gives, whatever the inputs are like."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from sinkring.exporter.passes.integer_products import MultiplyIntegers
from sinkring.exporter.quantize_symmetric import SymmetricMatrix
from sinkring.exporter.stored_weights import put_exact_products

from tests.exporter.ring_case import session

RNG = np.random.default_rng(5)
K = 64
# Of |x|.|w|, what a row's product may be off: half a step of the second digit, 127 * 508 of which are the largest input.
TOLERANCE = 1 / (127 * 508) * 1.1


def matrix(outputs: int) -> SymmetricMatrix:
    return SymmetricMatrix(
        "int8", K, RNG.integers(-127, 128, (outputs, K)).astype(np.int8), (RNG.random((outputs, 1)) / 127 + 1e-3).astype(np.float32)
    )


def product(weights: dict[str, SymmetricMatrix], dtype: ir.DataType = ir.DataType.FLOAT, batch: int | None = 1) -> ir.Model:
    """y = x . w, x [batch or B,T,K], w the named matrices side by side, as a traced graph has them."""
    name = "+".join(f"{part}.transposed" for part in weights)
    outputs = sum(part.shape[0] for part in weights.values())
    leading = [batch if batch else "B", "T"]
    x = ir.Value(name="x", shape=ir.Shape([*leading, K]), type=ir.TensorType(dtype))
    w = ir.Value(name=name, shape=ir.Shape([K, outputs]), type=ir.TensorType(dtype))
    w.const_value = ir.tensor(np.zeros((K, outputs), dtype.numpy()), name=name)
    node = ir.node("MatMul", [x, w])
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "y", ir.Shape([*leading, outputs]), ir.TensorType(dtype)
    graph = ir.Graph([x], [node.outputs[0]], nodes=[node], initializers=[w], opset_imports={"": 24}, name="product")
    model = ir.Model(graph, ir_version=10)
    MultiplyIntegers(weights)(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=False)
    return model


def expected(x: np.ndarray, weights: dict[str, SymmetricMatrix]) -> np.ndarray:
    whole = np.concatenate([part.values.astype(np.float64) * part.scales for part in weights.values()])
    return x.astype(np.float64) @ whole.T


def bound(x: np.ndarray, weights: dict[str, SymmetricMatrix]) -> np.ndarray:
    """Of each output of each row: the largest error that rounding to two digits, and float32 sums, may make."""
    whole = np.concatenate([np.abs(part.values.astype(np.float64)) * part.scales for part in weights.values()])
    largest = np.abs(x).max(axis=-1, keepdims=True)
    return (largest * TOLERANCE) @ whole.sum(axis=1)[None] + (np.abs(x) @ whole.T) * 1e-6


ROWS = {
    "normal": RNG.normal(size=(1, 5, K)),
    "one number far above the rest": np.concatenate([RNG.normal(size=(1, 5, K - 1)), np.full((1, 5, 1), 300.0)], axis=2),
    "a row of zeros": np.concatenate([np.zeros((1, 1, K)), RNG.normal(size=(1, 2, K))], axis=1),
    "tiny and huge rows": RNG.normal(size=(1, 4, K)) * np.array([1e-20, 1e20, 1.0, 1e-6])[None, :, None],
    "one row": RNG.normal(size=(1, 1, K)),
}


@pytest.mark.parametrize("kind", ROWS)
def test_it_is_the_product_with_the_stored_weights(kind: str) -> None:
    x, weights = ROWS[kind].astype(np.float32), {"q": matrix(24), "k": matrix(8)}
    found = session(product(weights)).run(None, {"x": x})[0]
    error = np.abs(found - expected(x, weights))
    assert (error <= bound(x[0], weights)[None]).all(), float((error / bound(x[0], weights)).max())


def test_one_digit_would_not_do() -> None:
    """The bound is one that inputs rounded to a single byte are far outside of."""
    x, weights = ROWS["one number far above the rest"].astype(np.float32), {"q": matrix(24)}
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    error = np.abs(expected(np.round(x / step) * step, weights) - expected(x, weights))
    assert (error / bound(x[0], weights)).max() > 20


def test_a_row_depends_on_itself_alone() -> None:
    weights = {"q": matrix(24)}
    run, x = session(product(weights)), RNG.normal(size=(1, 9, K)).astype(np.float32)
    x[0, 3] *= 1e6
    together = run.run(None, {"x": x})[0]
    for row in range(9):
        assert np.array_equal(run.run(None, {"x": x[:, row : row + 1]})[0][0, 0], together[0, row])


@pytest.mark.parametrize("place", [0, 5, K - 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_in_its_row(bad: float, place: int) -> None:
    run, x = session(product({"q": matrix(24)})), RNG.normal(size=(1, 3, K)).astype(np.float32)
    x[0, 1, place] = bad
    finite = np.isfinite(run.run(None, {"x": x})[0])
    assert finite[0, [0, 2]].all()
    assert not finite[0, 1].any()


def test_several_rows_of_a_batch() -> None:
    x, weights = RNG.normal(size=(3, 2, K)).astype(np.float32), {"q": matrix(24)}
    found = session(product(weights, batch=3)).run(None, {"x": x})[0]
    assert found.shape == (3, 2, 24)
    assert np.abs(found - expected(x, weights)).max() < 1e-3


def test_float16_goes_in_and_out() -> None:
    x, weights = RNG.normal(size=(1, 2, K)).astype(np.float16), {"q": matrix(24)}
    found = session(product(weights, ir.DataType.FLOAT16)).run(None, {"x": x})[0]
    right = expected(x, weights)
    assert found.dtype == np.float16
    assert np.abs(found - right).max() <= 1e-3 * np.abs(right).max()


def gemm(weight: SymmetricMatrix, stored_transposed: bool = False, **attributes: float) -> ir.Model:
    """y = x . w^T + bias of two dimensions, as a layer is traced whose tokens are one list: a router, an expert that all share."""
    outputs = weight.shape[0]
    x = ir.Value(name="x", shape=ir.Shape(["T", K]), type=ir.TensorType(ir.DataType.FLOAT))
    name, shape = ("q.transposed", (K, outputs)) if stored_transposed else ("q", (outputs, K))
    w = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    w.const_value = ir.tensor(np.zeros(shape, np.float32), name=name)
    bias = ir.Value(name="bias", shape=ir.Shape([outputs]), type=ir.TensorType(ir.DataType.FLOAT))
    bias.const_value = ir.tensor(np.arange(outputs, dtype=np.float32), name="bias")
    node = ir.node("Gemm", [x, w, bias], {"transB": int(not stored_transposed), **attributes})
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "y", ir.Shape(["T", outputs]), x.type
    graph = ir.Graph([x], [node.outputs[0]], nodes=[node], initializers=[w, bias], opset_imports={"": 24}, name="product")
    model = ir.Model(graph, ir_version=10)
    MultiplyIntegers({"q": weight}).call(model)
    return model


@pytest.mark.parametrize("stored_transposed", [False, True])
def test_a_gemm_keeps_its_bias(stored_transposed: bool) -> None:
    x, weight = RNG.normal(size=(5, K)).astype(np.float32), matrix(24)
    model = gemm(weight, stored_transposed)
    found, right = session(model).run(None, {"x": x})[0], expected(x, {"q": weight})
    assert (np.abs(found - right - np.arange(24)) <= bound(x, {"q": weight}) + 24e-6).all()
    exact = ir.to_proto(model)
    put_exact_products(exact)
    found = session(ir.from_proto(exact)).run(None, {"x": x})[0]
    assert (np.abs(found - right - np.arange(24)) <= np.abs(x) @ _columns({"q": weight}) * 1e-6 + 24e-6).all()


def test_a_gemm_that_scales_is_refused() -> None:
    with pytest.raises(ir.passes.PreconditionError, match="Gemm reads q"):
        gemm(matrix(24), alpha=0.5)


def test_put_exact_products_leaves_float32s_rounding() -> None:
    x, weights = ROWS["one number far above the rest"].astype(np.float32), {"q": matrix(24), "k": matrix(8)}
    model = ir.to_proto(product(weights))
    put_exact_products(model)
    found = session(ir.from_proto(model)).run(None, {"x": x})[0]
    assert (np.abs(found - expected(x, weights)) <= (np.abs(x[0]) @ _columns(weights))[None] * 1e-6).all()


def test_a_weight_that_is_more_than_a_factor_is_refused() -> None:
    weights = {"q": matrix(K)}
    name = "q.transposed"
    w = ir.Value(name=name, shape=ir.Shape([K, K]), type=ir.TensorType(ir.DataType.FLOAT))
    w.const_value = ir.tensor(np.zeros((K, K), np.float32), name=name)
    node = ir.node("Add", [w, w])
    graph = ir.Graph([], [node.outputs[0]], nodes=[node], initializers=[w], opset_imports={"": 24}, name="sum")
    with pytest.raises(ir.passes.PreconditionError, match=r"Add reads q\.transposed"):
        MultiplyIntegers(weights).call(ir.Model(graph, ir_version=10))


def _columns(weights: dict[str, SymmetricMatrix]) -> np.ndarray:
    """|w| as [K,N]."""
    return np.concatenate([np.abs(part.values.astype(np.float64)) * part.scales for part in weights.values()]).T
