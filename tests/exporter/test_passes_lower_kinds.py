"""What some families' attention has beside plain rotary: a softcap, learned sink logits, ALiBi slopes; and caches of another float type."""

from dataclasses import replace
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from sinkring.exporter.cache_plan import CachePlan, observe_layers, ring_names
from sinkring.exporter.engine_builder import compile_engine, load_builder
from sinkring.exporter.frontend import trace_step
from sinkring.exporter.lower import lower_for, simplify
from sinkring.exporter.node import DOMAIN
from sinkring.exporter.passes.insertion import Insertion
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lower_summed import LowerToSummedAttention
from sinkring.exporter.passes.lowering import LowerRingAttention
from sinkring.exporter.plan import read_plan
from sinkring.exporter.targets import TARGETS
from sinkring.models.registry import find_family
from sinkring.runtime.manifest import Ring, StateTensor
from sinkring.runtime.ring import RingGeometry

from tests.exporter.lowered_ring import FORMS, TOLERANCE, check, every_form, every_policy, lowered, two_layers
from tests.exporter.ring_case import NODE_INPUTS, RingCase, make_call, ring_model, session
from tests.models.tiny import tiny_llama

SLOPES = (0.5, 0.25, 0.7, 0.05)
KINDS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 4.0},
    "sink logits": {"sink_logits": True},
    "ALiBi": {"rotary": 0, "slopes": SLOPES},
    "ALiBi and a part of the head rotated": {"rotary": 4, "interleaved": True, "slopes": SLOPES},
    "all of them": {"rotary": 4, "softcap": 4.0, "sink_logits": True, "slopes": SLOPES, "scale": 1.0},
}
# float16 keys and values are wrong by 2**-12 of themselves: of a score of 30 that is 0.007, and so is a weight's error.
HALF_TOLERANCE = 3e-2
DECODER = RingGeometry(2, 9, 14)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_form
@every_policy
@every_kind
def test_static_step(form: str, policy: str, kind: str) -> None:
    groups = count()
    for sinks, window, tokens in product([0, 3], [1, 4], [1, 5]):
        for slack, batch in ((tokens - 1, 2), (tokens + 2, 1)):
            case = RingCase(sinks, window, slack, tokens, batch, groups=(2, 1, 4)[next(groups) % 3], policy=policy, **KINDS[kind])
            check(form, case, [tokens])


@every_form
@every_policy
@every_kind
def test_chunk_of_any_length(form: str, policy: str, kind: str) -> None:
    for sinks, batch in ((2, 1), (0, 2)):
        check(form, RingCase(sinks, 4, 4, None, batch, policy=policy, **KINDS[kind]), [1, 5])


@every_form
@every_policy
@pytest.mark.parametrize("kind", ["plain", *KINDS])
@pytest.mark.parametrize("tokens", [1, 5, None])
def test_float16_caches(form: str, policy: str, kind: str, tokens: int | None) -> None:
    """All arithmetic is float32, on what the caches hold."""
    for sinks, batch in ((2, 2), (0, 1)):
        case = RingCase(sinks, 4, 4, tokens, batch, policy=policy, cache_dtype="float16", **KINDS.get(kind, {}))
        check(form, case, [tokens or 3], HALF_TOLERANCE, TOLERANCE)


@every_form
@every_policy
@pytest.mark.parametrize("tokens", [1, None])
@pytest.mark.parametrize("cache_dtype", ["float32", "float16"])
def test_controls_fail_loudly(form: str, policy: str, tokens: int | None, cache_dtype: str) -> None:
    """Each of these must be seen by the checks above; a decoder that has lost one still speaks."""
    common: dict[str, Any] = {"policy": policy, "cache_dtype": cache_dtype}
    full: dict[str, Any] = {"rotary": 4, "softcap": 4.0, "sink_logits": True, "slopes": SLOPES}
    case = RingCase(2, 4, 2, tokens, **full, **common)
    calls = [make_call(case, [case.geometry.capacity + 4], 1, seed) for seed in range(4)]
    tolerance = TOLERANCE if cache_dtype == "float32" else HALF_TOLERANCE

    def error(other: RingCase, position: int = 0) -> float:
        graph = session(lowered(form, other))
        errors = []
        for call in calls:
            inputs = {name: call.inputs[name] for name in other.input_names}
            inputs["position"] = inputs["position"] + position
            errors.append(np.abs(graph.run(None, inputs)[0] - call.attended).max())
        return float(max(errors))

    assert error(case) <= tolerance
    wrong = {
        "no softcap": RingCase(2, 4, 2, tokens, **{**full, "softcap": 0.0}, **common),
        "another softcap": RingCase(2, 4, 2, tokens, **{**full, "softcap": 6.0}, **common),
        "no sink logits": RingCase(2, 4, 2, tokens, **{**full, "sink_logits": False}, **common),
        "no slopes": RingCase(2, 4, 2, tokens, **{**full, "slopes": ()}, **common),
        "slopes of other heads": RingCase(2, 4, 2, tokens, **{**full, "slopes": SLOPES[::-1]}, **common),
        "the other policy": RingCase(2, 4, 2, tokens, **full, cache_dtype=cache_dtype, policy="native") if policy == "streaming" else None,
    }
    for name, other in wrong.items():
        assert other is None or error(other) > 3 * tolerance, f"{name}: only {error(other):.2g} off"


@every_form
def test_distance_to_a_sink_stops_growing_only_under_streaming(form: str) -> None:
    """At position 2**40 a native sink lies too far back to count; a streaming one counts as it did when the cache was just full."""
    for policy, cache_dtype in product(("native", "streaming"), ("float32", "float16")):
        case = RingCase(2, 4, 0, 1, policy=policy, rotary=0, slopes=SLOPES, cache_dtype=cache_dtype)
        call = make_call(case, [1 << 40], 1)
        graph = session(lowered(form, case))
        moved = {**call.inputs, "key_ring": call.inputs["key_ring"] + np.array([1, 1, 0, 0, 0, 0], cache_dtype)[:, None]}
        changed = np.abs(graph.run(None, moved)[0] - graph.run(None, call.inputs)[0]).max()
        assert (changed > 1e-2) == (policy == "streaming"), f"{policy}, {cache_dtype}: {changed:.2g}"


@every_form
@every_kind
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_scatter_is_the_only_reader_of_a_ring_and_nothing_is_between(form: str, kind: str, tokens: int) -> None:
    for cache_dtype in ("float32", "float16"):
        model = lowered(form, RingCase(2, 4, 4, tokens, policy="streaming", cache_dtype=cache_dtype, **KINDS[kind]))
        for name in ("key_ring", "value_ring"):
            (ring,) = (value for value in model.graph.inputs if value.name == name)
            (reader,) = ring.consumers()
            assert reader.op_type == "TensorScatter"
            assert reader.outputs[0].is_graph_output()
            assert str(reader.outputs[0].dtype).lower().startswith("float16") == (cache_dtype == "float16")


def test_a_node_that_the_fused_operator_cannot_express_has_another_form() -> None:
    for kind, fused in ({}, True), (KINDS["ALiBi"], True), (KINDS["softcap"], False), (KINDS["sink logits"], False):
        for tokens, other in ((1, LowerToSummedAttention), (5, LowerToGroupedAttention)):
            for cache_dtype in ("float32", "float16"):
                case = RingCase(2, 4, 4, tokens, policy="streaming", cache_dtype=cache_dtype, **kind)
                model = lowered("fused", case)
                assert any(node.op_type == "Attention" for node in model.graph) == fused, case
                assert (_text(model) == _text(_lowered_by(other, case))) != fused, case


def test_a_chunk_in_sums_is_refused() -> None:
    with pytest.raises(ir.passes.PreconditionError, match="T=5"):
        _lowered_by(LowerToSummedAttention, RingCase(2, 4, 4, 5))


@cache
def _decoder(policy: str, cache_dtype: str) -> ir.Model:
    """Two layers, H=6, G=2, D=16: what the builder makes of a node depends on what is around it."""
    model = tiny_llama(heads=6, kv_heads=2, head_dim=16)
    family = find_family(model.config)
    caches = CachePlan(observe_layers(model, family, 256), (Ring("write_index.0", DECODER, (0, 1)),))
    stored = getattr(torch, cache_dtype)
    return simplify(trace_step(model, family, caches, role="decode", policy=policy, batch=1, chunk=4, cache_dtype=stored))


@pytest.mark.parametrize("kind", ["plain", "softcap", "sink logits", "ALiBi"])
@pytest.mark.parametrize(("policy", "cache_dtype"), [("streaming", "float32"), ("native", "float16"), ("streaming", "float16")])
def test_tensorrt_reads_the_rings_in_place(kind: str, policy: str, cache_dtype: str, tmp_path: Path) -> None:
    """The real builder's plan of a whole decode step: no copy of a ring."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    model = _decoder(policy, cache_dtype).clone()
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        if kind == "softcap":
            node.attributes["softcap"] = ir.AttrFloat32("softcap", 30.0)
        if kind == "ALiBi":
            node.attributes["alibi_slopes"] = ir.AttrFloat32s("alibi_slopes", [0.5**head for head in range(6)])
        if kind == "sink logits":
            logits = Insertion(model.graph, node).constant(f"{node.outputs[0].name}.sink_logits", np.arange(6, dtype=np.float32))
            node.resize_inputs(10)
            node.replace_input_with(9, logits)
    onnx.save(ir.to_proto(lower_for(TARGETS["tensorrt-rtx"], "decode", model)), tmp_path / "step.onnx")
    compiled = compile_engine(load_builder("tensorrt-rtx"), "tensorrt-rtx", tmp_path / "step.onnx", 89, {})
    shape = (1, 2, DECODER.capacity, 16)
    states = tuple(
        StateTensor(name, f"{name}.updated", "ring", shape, cache_dtype, 0, 0.0, ring=0, layer=layer)
        for layer in range(2)
        for name in ring_names(layer)
    )
    plan = read_plan(compiled.plan_text, states, 1)
    assert plan.faults() == ()
    assert [update.in_place for layer in plan.layers for update in layer.updates] == [True] * 4


def test_tensorrt_copies_the_rings_of_the_grouped_form(tmp_path: Path) -> None:
    """The control, and why a decode step is not given that form."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    case = RingCase(2, 9, 5, 1, softcap=4.0)
    onnx.save(ir.to_proto(lowered("grouped", case)), tmp_path / "step.onnx")
    compiled = compile_engine(load_builder("tensorrt-rtx"), "tensorrt-rtx", tmp_path / "step.onnx", 89, {})
    faults = read_plan(compiled.plan_text, case.states, 1).faults()
    assert sum("makes a copy of" in fault for fault in faults) == 2


def _lowered_by(form: type[LowerRingAttention], case: RingCase) -> ir.Model:
    model = ring_model(case)
    form()(model)
    return model


def _text(model: ir.Model) -> str:
    return str(onnx.printer.to_text(ir.to_proto(model)))


@every_form
def test_layers_share_a_mask_only_if_it_is_the_same(form: str) -> None:
    """Layers of several geometries in one graph: each computes what it computes alone, and has a mask of its own only if it must."""
    first = RingCase(2, 4, 4, 5, rotary=0, slopes=SLOPES)
    for second, share, masks, biases in (
        (first, True, 1, 1),
        (first, False, 2, 2),
        (replace(first, slopes=SLOPES[::-1]), True, 1, 2),
        (replace(first, policy="streaming"), True, 1, 2),
        (replace(first, slopes=()), True, 1, 1),
        (replace(first, window=3, slack=5), True, 2, 2),
        (replace(first, slack=6), True, 2, 2),
        (replace(first, sinks=1, slack=5), True, 2, 2),
    ):
        model = two_layers(first, second, share)
        FORMS[form]()(model)
        assert sum(_is_mask(node) for node in model.graph) == masks, second
        assert sum(_is_slope_bias(node) for node in model.graph) == biases, second
        graph = session(model)
        # Before its wrap every ring has token p in slot p, so that one write index is right for both.
        calls = [make_call(case, [start], 5) for case, start in ((first, 4), (second, 4 if share else 5))]
        inputs = {f"{name}.{index}": array for index, call in enumerate(calls) for name, array in call.inputs.items()}
        outputs = graph.run(None, {value.name: inputs[value.name] for value in graph.get_inputs()})
        for index, call in enumerate(calls):
            assert call.error(outputs[3 * index : 3 * index + 3]) <= TOLERANCE, f"layer {index} beside {second}"


def _is_mask(node: ir.Node) -> bool:
    return node.op_type == "Where" and getattr(node.inputs[1], "name", None) == "mask.zero"


def _is_slope_bias(node: ir.Node) -> bool:
    return node.op_type == "Mul" and str(getattr(node.inputs[1], "name", None)).startswith("alibi.")


@every_form
def test_a_node_that_is_not_of_the_contract_is_refused(form: str) -> None:
    model = ring_model(RingCase(2, 4, 0, 1, rotary=0, slopes=(0.5, 0.25)))
    with pytest.raises(ir.passes.PreconditionError, match="2 alibi_slopes for H=4"):
        FORMS[form]()(model)
    model = ring_model(RingCase(2, 4, 0, 1, policy="streaming"))
    model.graph.node(0).replace_input_with(NODE_INPUTS.index("shift_sin"), None)
    with pytest.raises(ir.passes.PreconditionError, match="shift_cos and shift_sin"):
        FORMS[form]()(model)
