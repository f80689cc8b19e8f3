"""The tail of a graph gives what the whole graph gives, and some of the logits stand for all of them only where they change."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from sinkring.exporter import graph_tail
from sinkring.exporter.graph_tail import (
    SOME_LOGITS,
    crossing_values,
    first_readers,
    tail_of,
    tail_starts,
    with_outputs,
    with_some_logits,
)

# `early` is read once before the last two products and once in the branch that only they take.
GRAPH = """
<ir_version: 10, opset_import: ["" : 24]>
step (float[2,3] x, bool[1] deep) => (float[1,2,6] logits, float[2,3] state) <int64[3] shape = {1, 2, 6}> {
    looked = Sqrt (x)
    one = MatMul (looked, first)
    state = Neg (one)
    two = Add (one, early)
    branch = If (deep) <then_branch = yes () => (float[2,3] a) { a = Mul (two, late) },
                        else_branch = no () => (float[2,3] b) { b = Identity (one) }>
    made = MatMul (branch, head)
    logits = Reshape (made, shape)
}
"""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    monkeypatch.setattr(graph_tail, "_BYTES_BETWEEN", 1)
    monkeypatch.setattr(graph_tail, "_MANY", 6)
    monkeypatch.setattr(graph_tail, "SOME", 2)
    parsed = onnx.parser.parse_model(GRAPH)
    rng = np.random.default_rng(0)
    for name, shape in {"first": (3, 3), "early": (3,), "late": (3,), "head": (3, 6)}.items():
        parsed.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return parsed


FEEDS = {"x": np.arange(1, 7, dtype=np.float32).reshape(2, 3), "deep": np.array([True])}


def run(model: onnx.ModelProto, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()})


def test_readers_and_what_crosses_see_into_branches(model: onnx.ModelProto) -> None:
    operators = [node.op_type for node in model.graph.node]
    assert operators == ["Sqrt", "MatMul", "Neg", "Add", "If", "MatMul", "Reshape"]
    readers = first_readers(model)
    assert (readers["late"], readers["one"], readers["head"]) == (4, 2, 5)
    assert crossing_values(model, 4) == ["one", "two"]
    assert crossing_values(model, 5) == ["branch"]


def test_tails_begin_behind_equal_shares_of_the_weights(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name != "shape"}
    # What is read in a branch is no product that takes long.
    assert tail_starts(model, weights) == [0, 2, 4]
    monkeypatch.setattr(graph_tail, "_BYTES_BETWEEN", 1 << 20)
    assert tail_starts(model, weights) == []


@pytest.mark.parametrize("start", [0, 2, 4, 5])
def test_a_tail_gives_what_the_whole_gives(model: onnx.ModelProto, start: int) -> None:
    names = crossing_values(model, start)
    whole = run(with_outputs(model, names), ["logits", *names], FEEDS)
    entering = dict(zip(names, whole[1:], strict=True))
    tail = tail_of(model, start, {name: (TensorProto.FLOAT, array.shape) for name, array in entering.items()}, "logits")
    assert [node.op_type for node in tail.graph.node] == [node.op_type for node in model.graph.node[start:] if node.op_type != "Neg"]
    assert "first" not in {tensor.name for tensor in tail.graph.initializer} or start == 0
    (logits,) = run(tail, ["logits"], {**FEEDS, **entering})
    assert np.allclose(logits, whole[0], rtol=1e-6)
    if entering:
        (other,) = run(tail, ["logits"], {**FEEDS, **{name: 2 * array for name, array in entering.items()}})
        assert not np.allclose(other, whole[0], rtol=1e-2), "the control"


@pytest.mark.parametrize("transposed", [False, True])
def test_some_logits_are_the_first_of_each_row(model: onnx.ModelProto, transposed: bool) -> None:
    if transposed:
        (head,) = [tensor for tensor in model.graph.initializer if tensor.name == "head"]
        head.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(head).T), "head"))
        model.graph.node[5].CopyFrom(onnx.helper.make_node("Gemm", ["branch", "head"], ["made"], transB=1))
    marked = with_some_logits(model, "logits")
    assert marked is not None
    logits, some = run(marked, ["logits", SOME_LOGITS], FEEDS)
    assert some.shape == (2, 2)
    assert np.allclose(some, logits[0, :, :2], rtol=1e-6)


def test_a_head_whose_logits_are_capped_or_few_is_left_alone(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    model.graph.node[6].input[0] = "capped"
    model.graph.node.insert(6, onnx.helper.make_node("Tanh", ["made"], ["capped"]))
    assert with_some_logits(model, "logits") is None, "tanh may round a change away"
    del model.graph.node[6]
    model.graph.node[6].input[0] = "made"
    assert with_some_logits(model, "logits") is not None
    monkeypatch.setattr(graph_tail, "_MANY", 7)
    assert with_some_logits(model, "logits") is None


def test_a_change_of_other_logits_alone_is_seen(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sinkring.exporter.everything_used import _filled
    from sinkring.exporter.influence import ProbedGraph
    from sinkring.runtime.manifest import Manifest

    monkeypatch.setattr(graph_tail, "_BYTES_BETWEEN", 1)
    monkeypatch.setattr(graph_tail, "_MANY", 97)
    monkeypatch.setattr(graph_tail, "SOME", 8)
    graph, _ = _filled(tiny_bundle, "prefill.heads.onnx", Manifest.read(tiny_bundle))
    assert isinstance(graph, ProbedGraph)
    (part,) = [part for part in graph.parts if "lm_head" in part.name]
    ((name, array),) = graph.changed_weight(part).items()
    right = np.array(graph._read(graph._weights[name]))
    columns = 0 if right.shape[0] == 97 else 1
    late, early = np.array(right), np.array(right)
    np.moveaxis(late, columns, 0)[-1] = np.moveaxis(array, columns, 0)[-1]
    np.moveaxis(early, columns, 0)[0] = np.moveaxis(array, columns, 0)[0]
    ran: list[int | None] = []
    logits = graph._logits
    monkeypatch.setattr(graph, "_logits", lambda *given: ran.append(given[3]) or logits(*given))
    assert graph.effect({name: early}) > 0
    assert None not in ran, "in the tail alone"
    assert graph.effect({name: late}) > 0
    assert None in ran, "in the whole graph"
    ran.clear()
    assert graph.effect({name: right}) == 0
    assert {type(way) for way in ran} == {int, type(None)}
