"""What opset 20 lacks, written in older operators: the same numbers from ONNX Runtime's own operator and from what stands for it."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from sinkring.exporter.passes.older_operators import OlderOperators

from tests.exporter.ring_case import session

RANDOM = np.random.default_rng(4)


def model(node: onnx.NodeProto, inputs: dict[str, np.ndarray], tokens: str | None = None) -> ir.Model:
    """tokens: the name of the third axis of x, if its size is to be open."""
    values = []
    for name, array in inputs.items():
        shape: list[int | str] = list(array.shape)
        if tokens and name == "x":
            shape[2] = tokens
        if tokens and name in ("cos", "sin"):
            shape[1] = tokens
        values.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))
    shape = [dim.dim_value or dim.dim_param for dim in values[0].type.tensor_type.shape.dim]
    out = helper.make_tensor_value_info("y", values[0].type.tensor_type.elem_type, shape)
    graph = helper.make_graph([node], "one", values, [out])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10))


def differs(node: onnx.NodeProto, inputs: dict[str, np.ndarray], tokens: str | None = None) -> float:
    """By how much, at most; asserts that the node is gone and that opset 20 knows what is there."""
    before = model(node, inputs, tokens)
    (expected,) = session(before).run(None, inputs)
    OlderOperators()(before)
    before.opset_imports[""], before.ir_version = 20, 9
    onnx.checker.check_model(ir.to_proto(before), full_check=True)
    (found,) = session(before).run(None, inputs)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected.astype(np.float64)).max())


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rotary", [0, 4])
@pytest.mark.parametrize("tokens", [None, "T"])
def test_rotary_embedding(interleaved: int, rotary: int, tokens: str | None) -> None:
    for batch, length in ((2, 3), (1, 1)):
        angles = RANDOM.normal(size=(batch, length, (rotary or 8) // 2))
        inputs = {"x": RANDOM.normal(size=(batch, 5, length, 8)), "cos": np.cos(angles), "sin": np.sin(angles)}
        node = helper.make_node("RotaryEmbedding", list(inputs), ["y"], interleaved=interleaved, rotary_embedding_dim=rotary)
        assert differs(node, {name: array.astype(np.float32) for name, array in inputs.items()}, tokens) <= 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rms_normalization(dtype: type) -> None:
    inputs = {"x": (RANDOM.normal(size=(2, 3, 16)) * 5).astype(dtype), "scale": RANDOM.normal(size=16).astype(dtype)}
    for epsilon in (1e-6, 0.5):
        node = helper.make_node("RMSNormalization", list(inputs), ["y"], axis=-1, epsilon=epsilon)
        # ONNX Runtime's own rounds float16 once more or less.
        assert differs(node, inputs) <= (1e-6 if dtype == np.float32 else 2e-2)


def test_integers_are_clipped_in_halves_and_floats_stay() -> None:
    inputs = {"x": np.arange(-4, 5), "low": np.array(-2), "high": np.array(3)}
    assert differs(helper.make_node("Clip", list(inputs), ["y"]), inputs) == 0
    assert differs(helper.make_node("Clip", ["x", "low"], ["y"]), {name: inputs[name] for name in ("x", "low")}) == 0
    floats = {name: array.astype(np.float32) for name, array in inputs.items()}
    kept = model(helper.make_node("Clip", list(floats), ["y"]), floats)
    assert not OlderOperators()(kept).modified


def test_a_rotation_of_another_rank_is_refused() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 16])
    table = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 4]) for name in ("cos", "sin")]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 16])
    graph = helper.make_graph([helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"], num_heads=2)], "one", [value, *table], [out])
    with pytest.raises(ir.passes.PreconditionError, match="only \\[B,H,T,D\\] is known"):
        OlderOperators()(ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])))
