"""From a traced graph to a target's: each stage computes what the one before did, and keeps what runtimes need."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from sinkring.exporter.cache_plan import CachePlan, observe_layers
from sinkring.exporter.frontend import trace_step
from sinkring.exporter.lower import lower_for, simplify
from sinkring.exporter.node import DOMAIN
from sinkring.exporter.targets import TARGETS, find_target
from sinkring.exporter.tensorrt_operators import TENSORRT_10_OPERATORS
from sinkring.models.registry import find_family
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Ring, Role
from sinkring.runtime.ring import RingGeometry

from tests.exporter.run_traced import TracedStep, zero_rings
from tests.models.tiny import tiny_llama
from tests.parity.closeness import assert_loudly_wrong, assert_parity

GEOMETRY = RingGeometry(2, 4, 6)
LAYERS = 2
ROLES: tuple[Role, ...] = ("decode", "prefill")
every_role = pytest.mark.parametrize("role", ROLES)
# The model of these tests is float32 in all parts.
WIDE = {name: target for name, target in TARGETS.items() if not target.only_float16}
every_target = pytest.mark.parametrize("target", sorted(WIDE))
in_place = pytest.mark.parametrize("target", sorted(name for name, target in WIDE.items() if target.update == "in_place"))
every_head = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@cache
def traced(role: Role, tied: bool) -> ir.Model:
    model = tiny_llama(tied=tied, layers=LAYERS, attention_bias=tied)
    family = find_family(model.config)
    caches = CachePlan(observe_layers(model, family, 256), (Ring("write_index.0", GEOMETRY, tuple(range(LAYERS))),))
    return trace_step(model, family, caches, role=role, policy="streaming", batch=1, chunk=3)


@cache
def simplified(role: Role, tied: bool) -> ir.Model:
    return simplify(traced(role, tied).clone())


def feed_all(feed: Callable[..., np.ndarray], role: Role, tokens: int = 22) -> np.ndarray:
    """Logits [N,V] of a stream past its third wrap, by calls of one token or of up to three."""
    ids = np.random.default_rng(0).integers(0, 97, (1, tokens))
    parts, start = [], 0
    while start < tokens:
        length = 1 if role == "decode" else min(1 + start % 3, tokens - start, GEOMETRY.room(start))
        parts.append(feed(ids[:, start : start + length], [start], None if role == "decode" else list(range(length)))[0])
        start += length
    return np.concatenate(parts)


@cache
def expected(role: Role, tied: bool) -> np.ndarray:
    return feed_all(TracedStep(traced(role, tied), GEOMETRY).feed, role)


class LoweredStep(TracedStep):
    """The same calls in ONNX Runtime."""

    def __post_init__(self) -> None:
        self.rings = zero_rings(self.model)
        self._evaluator = ort.InferenceSession(ir.to_proto(self.model).SerializeToString(), providers=["CPUExecutionProvider"])


@every_role
@every_head
def test_simplified_computes_what_was_traced(role: Role, tied: bool) -> None:
    actual = feed_all(TracedStep(simplified(role, tied), GEOMETRY).feed, role)
    assert_parity(actual, expected(role, tied))
    assert_loudly_wrong(actual, expected(role, not tied), "another model")


@every_role
@every_head
@every_target
def test_lowered_computes_what_was_traced(target: str, role: Role, tied: bool) -> None:
    model = lower_for(TARGETS[target], role, simplified(role, tied))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert_parity(feed_all(LoweredStep(model, GEOMETRY).feed, role), expected(role, tied))


@every_role
@in_place
def test_what_a_target_is_given(target: str, role: Role) -> None:
    model = lower_for(TARGETS[target], role, simplified(role, False))
    assert model.opset_imports == {"": 24}, "from opset 25 on Attention has attributes that ONNX Runtime has no kernel for"
    assert model.ir_version in (10, 11)
    assert {node.domain for node in model.graph} == {""}
    rings = [value for value in model.graph.inputs if str(value.name).startswith("cache.")]
    assert len(rings) == 2 * LAYERS
    for ring in rings:
        (reader,) = ring.consumers()
        assert reader.op_type == "TensorScatter", f"{ring.name} is read by {reader.op_type}"
        assert reader.outputs[0].name == f"{ring.name}.updated"
        assert reader.outputs[0].is_graph_output()
        assert "mode" not in reader.attributes or reader.attributes["mode"].as_string() == "linear"
    for node in model.graph:
        if node.op_type == "Attention":
            assert len(node.inputs) == 4, "mask, but no past and no nonpad_kv_seqlen"
            assert {"is_causal", "softcap", "softmax_precision"}.isdisjoint(node.attributes)


@every_role
def test_what_tensorrt_10_is_given(role: Role) -> None:
    """No plugin, no operator or opset beyond its parser's, and rings that nothing writes."""
    model = lower_for(TARGETS["tensorrt-10.3"], role, simplified(role, False))
    assert (model.opset_imports, model.ir_version) == ({"": 20}, 9)
    assert {node.domain for node in model.graph} == {""}
    assert {node.op_type for node in model.graph} <= TENSORRT_10_OPERATORS
    assert not [node.name for node in model.graph if node.op_type == "Clip" and node.outputs[0].dtype == ir.DataType.INT64]
    assert any(node.op_type == "Clip" for node in traced(role, False).graph), "then the line above proves nothing"
    rings = [value for value in model.graph.inputs if str(value.name).startswith("cache.")]
    assert len(rings) == 2 * LAYERS
    cache = GEOMETRY.capacity * 2 * 8
    copying = [
        node.name
        for node in model.graph
        if node.op_type in ("Concat", "Where", "ScatterND", "ScatterElements", "Expand", "Tile", "Pad")
        and node.outputs[0].shape is not None
        and node.outputs[0].shape.is_static()
        and np.prod([int(size) for size in node.outputs[0].shape]) >= cache  # type: ignore[arg-type]
    ]
    assert copying == []


def test_an_operator_that_a_parser_lacks_is_refused_by_name() -> None:
    model = simplified("decode", False).clone()
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    swish = ir.node("Swish", [logits])
    model.graph.append(swish)
    model.graph.outputs.append(swish.outputs[0])
    with pytest.raises(UnsupportedError, match=r"target tensorrt-10\.3: its parser has no operator Swish"):
        lower_for(TARGETS["tensorrt-10.3"], "decode", model)


@every_role
def test_the_interface_outlives_every_stage(role: Role) -> None:
    def interface(model: ir.Model) -> list[tuple[str | None, str, ir.DataType | None]]:
        return [(value.name, str(value.shape), value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)]

    before = interface(traced(role, False))
    assert interface(simplified(role, False)) == before
    tokens = 1 if role == "decode" else "T"
    with_rows = [
        (name.replace(".updated", ".rows"), f"[1,2,{tokens},8]", dtype) if name and name.endswith(".updated") else (name, shape, dtype)
        for name, shape, dtype in before
    ]
    for target in WIDE.values():
        assert interface(lower_for(target, role, simplified(role, False))) == (before if target.update == "in_place" else with_rows)


@every_role
@every_target
def test_no_trace_of_the_machine(target: str, role: Role) -> None:
    """The tracer notes files and lines of the code it ran; a graph must not carry them, nor differ between machines by them."""
    written = ir.to_proto(lower_for(TARGETS[target], role, simplified(role, False))).SerializeToString()
    here = [str(Path(__file__).parents[2]), str(Path(onnx.__file__).parents[1]), "site-packages", ".py"]
    assert any(path.encode() in ir.to_proto(traced(role, False)).SerializeToString() for path in here), "then this test proves nothing"
    assert not [path for path in here if path.encode() in written]


@every_head
@every_role
def test_every_weight_counts(role: Role, tied: bool) -> None:
    """Each large initializer, changed, changes the logits: none was left out, none is stored twice."""
    model = lower_for(TARGETS["onnxruntime"], role, simplified(role, tied))
    right = feed_all(LoweredStep(model, GEOMETRY).feed, role, tokens=6)
    weights = {name: value for name, value in model.graph.initializers.items() if value.dtype == ir.DataType.FLOAT and "digit" not in name}
    ours = [value for value in weights.values() if value.const_value is not None and value.const_value.nbytes >= 128]
    assert len(ours) >= 4 * LAYERS
    for value in ours:
        kept = value.const_value
        assert kept is not None
        value.const_value = ir.tensor(kept.numpy() * np.float32(1.5), name=value.name)
        wrong = feed_all(LoweredStep(model, GEOMETRY).feed, role, tokens=6)
        value.const_value = kept
        assert_loudly_wrong(wrong, right, str(value.name))
    parameters = sum(parameter.numel() for parameter in tiny_llama(tied=tied, layers=LAYERS, attention_bias=tied).parameters())
    assert sum(value.const_value.nbytes for value in ours if value.const_value is not None) <= 4 * parameters


def optimized(model: ir.Model, folder: Path) -> onnx.GraphProto:
    """What ONNX Runtime makes of a graph."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx").graph


def test_onnx_runtime_keeps_the_fused_operator(tmp_path: Path) -> None:
    """It inlines an Attention that it has no kernel for into dozens of nodes, without a word and six times slower."""
    model = lower_for(TARGETS["tensorrt-rtx"], "decode", simplified("decode", False))
    kept = optimized(model, tmp_path).node
    assert sum(node.op_type == "Attention" for node in kept) == LAYERS


@every_role
def test_onnx_runtime_reads_a_ring_where_it_lies(role: Role, tmp_path: Path) -> None:
    """Of a product that has a factor, or one side of which is turned by a node of its own, it packs a copy first."""
    model = lower_for(TARGETS["onnxruntime"], role, simplified(role, False))
    whole = optimized(model, tmp_path)
    nodes = [*whole.node, *(node for outer in whole.node for branch in outer.attribute for node in branch.g.node)]
    products = [{a.name: a for a in node.attribute} for node in nodes if node.op_type == "FusedMatMul"]
    # Of the ring, and of the sinks.
    assert len(products) == 2 * LAYERS
    assert {(attributes["alpha"].f, attributes["transB"].i) for attributes in products} == {(1.0, 1)}
    assert not any(node.op_type == "Transpose" and list(node.attribute[0].ints) == [0, 1, 2, 4, 3] for node in nodes)


def test_an_unknown_target_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'tensorrt-11' is not known; known: onnxruntime, tensorrt, tensorrt-10\.3, tensorrt-rtx"):
        find_target("tensorrt-11")


@every_role
def test_simplified_keeps_the_nodes_for_the_lowerings(role: Role) -> None:
    assert sum(node.domain == DOMAIN for node in simplified(role, False).graph) == LAYERS
