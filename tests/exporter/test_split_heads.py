"""Heads that are laid out at once and then told apart are the heads of each part by itself, to the bit."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from sinkring.exporter.passes.split_heads import SplitHeadsTogether

RNG = np.random.default_rng(0)
# Query heads and key and value heads of a joint projection, of the size D.
HEADS = {"grouped": (3, 1, 1), "as many": (2, 2, 2), "two parts": (4, 2)}


def joint(heads: tuple[int, ...], size: int, batch: int, tokens: int | str, *, perm: str = "0,2,1,3", also: int | None = None) -> ir.Model:
    """perm: of the last part's Transpose. also: of the first part's Reshape, which then has another head size."""
    widths = [count * size for count in heads]
    sizes = [also or size, *[size] * (len(heads) - 1)]
    lines = [f"{', '.join(f's{i}' for i in range(len(heads)))} = Split<axis=-1>(x, widths)"]
    for part, (width, part_size) in enumerate(zip(widths, sizes, strict=True)):
        order = perm if part == len(heads) - 1 else "0,2,1,3"
        lines.append(f"shape{part} = Constant<value_ints=[{batch},-1,{width // part_size},{part_size}]>()")
        lines.append(f"r{part} = Reshape(s{part}, shape{part})  y{part} = Transpose<perm=[{order}]>(r{part})")
    outputs = ", ".join(f"float[{batch},?,?,?] y{part}" for part in range(len(heads)))
    text = f"""<ir_version: 10, opset_import: ["": 24]> g (float[{batch},{tokens},{sum(widths)}] x) => ({outputs})
    <int64[{len(widths)}] widths = {{{",".join(map(str, widths))}}}> {{ {"  ".join(lines)} }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True, strict_mode=True))


def run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("batch", "tokens", "fed"), [(1, "T", 1), (1, "T", 7), (1, 1, 1), (3, 1, 1), (2, 5, 5)])
def test_the_parts_are_the_same(heads: tuple[int, ...], batch: int, tokens: int | str, fed: int) -> None:
    model = joint(heads, 4, batch, tokens)
    x = RNG.standard_normal((batch, fed, 4 * sum(heads)), dtype=np.float32)
    before = run(model, x)
    shapes = [value.shape for value in model.graph.outputs]
    assert SplitHeadsTogether()(model).modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert operators(model) == ["Reshape", "Transpose", "Split"]
    assert [value.shape for value in model.graph.outputs] == shapes
    for found, expected in zip(run(model, x), before, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "other", [{"perm": "0,1,2,3"}, {"perm": "0,2,3,1"}, {"also": 2}], ids=["not turned", "turned otherwise", "of two sizes"]
)
def test_parts_that_are_laid_out_in_other_ways_stay(other: dict) -> None:
    model = joint((3, 1, 1), 4, 1, "T", **other)
    before = operators(model)
    assert not SplitHeadsTogether()(model).modified
    assert operators(model) == before


def test_a_part_that_is_read_by_something_else_stays() -> None:
    model = joint((3, 1, 1), 4, 1, "T")
    split = next(node for node in model.graph if node.op_type == "Split")
    model.graph.outputs.append(split.outputs[1])
    assert not SplitHeadsTogether()(model).modified
