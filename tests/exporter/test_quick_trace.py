"""What makes a trace quicker changes nothing of it: the same rewrites of a graph, and the same table of operators."""

import gc
from unittest import mock

import onnx_ir as ir
import pytest
from onnxscript import optimizer, rewriter
from sinkring.exporter.quick_rules import default_rules_at_their_operators
from sinkring.exporter.quick_trace import quick_trace
from torch.onnx._internal.exporter._registration import ONNXRegistry

# Of the rewrites: a product with one, a sum with zero on the other side, two casts, two transposes, two slices that are a split.
GRAPH = """
<ir_version: 10, opset_import: ["" : 24]>
step (float[2,4] x) => (float[4,2] y, float[2,2] first, float[2,2] second) <
    float one = {1}, float zero = {0}, int64[1] start = {0}, int64[1] middle = {2}, int64[1] stop = {4}, int64[1] axis = {1}> {
    scaled = Mul (x, one)
    moved = Add (zero, scaled)
    narrow = Cast <to = 10> (moved)
    wide = Cast <to = 1> (narrow)
    root = Sqrt (wide)
    there = Transpose <perm = [1, 0]> (root)
    back = Transpose <perm = [1, 0]> (there)
    again = Transpose <perm = [1, 0]> (back)
    y = Neg (again)
    first = Slice (root, start, middle, axis)
    second = Slice (root, middle, stop, axis)
}
"""


def operators(model: ir.Model) -> list[tuple[str, list[str], list[str]]]:
    return [
        (node.op_type, [str(value.name) for value in node.inputs if value], [str(v.name) for v in node.outputs]) for node in model.graph
    ]


def test_the_same_is_rewritten() -> None:
    usual, quick = ir.from_onnx_text(GRAPH), ir.from_onnx_text(GRAPH)
    before = operators(usual)
    optimizer.optimize_ir(usual)
    with default_rules_at_their_operators():
        optimizer.optimize_ir(quick)
    assert operators(quick) == operators(usual)
    kinds = [kind for kind, _, _ in operators(quick)]
    assert len(before) == 11
    assert "Mul" not in kinds, "or nothing was rewritten"
    assert "Add" not in kinds
    assert kinds.count("Transpose") == 1


def test_a_rule_is_tried_at_its_operator_only() -> None:
    model = ir.from_onnx_text(GRAPH)
    asked: list[str] = []
    rules = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name == "TransposeTranspose"]
    with mock.patch.object(rules[0], "try_rewrite", side_effect=lambda model, graph, node, **_: asked.append(node.op_type)):
        with default_rules_at_their_operators():
            optimizer.optimize_ir(model)
        assert set(asked) == {"Transpose"}
        asked.clear()
        optimizer.optimize_ir(ir.from_onnx_text(GRAPH))
        assert {"Transpose", "Sqrt"} <= set(asked), "the control"


def test_outside_the_block_all_is_as_it_was() -> None:
    rules, table = rewriter._DEFAULT_REWRITE_RULES, ONNXRegistry.from_torchlib
    with default_rules_at_their_operators(), quick_trace():
        assert rewriter._DEFAULT_REWRITE_RULES is not rules
        assert ONNXRegistry.from_torchlib is not table
        assert not gc.isenabled()
    assert rewriter._DEFAULT_REWRITE_RULES is rules
    assert ONNXRegistry.from_torchlib == table
    assert gc.isenabled()


def test_an_error_leaves_nothing_behind_and_a_collector_that_is_off_stays_so() -> None:
    with pytest.raises(ValueError, match="in the block"), quick_trace():
        raise ValueError("in the block")
    assert gc.isenabled()
    gc.disable()
    try:
        with quick_trace():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_table_is_made_once_and_is_the_usual_one() -> None:
    with quick_trace():
        first = ONNXRegistry().from_torchlib(opset_version=24)
    with quick_trace():
        second = ONNXRegistry().from_torchlib(opset_version=24)
    usual = ONNXRegistry().from_torchlib(opset_version=24)
    assert first is second
    assert first is not usual
    assert first.opset_version == usual.opset_version
    assert set(first.functions) == set(usual.functions)
