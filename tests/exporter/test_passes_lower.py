"""Each lowering of a graph with one RingAttention node, run in ONNX Runtime: against the node's reference and against plain attention."""

from itertools import count, product

import numpy as np
import onnx_ir as ir
import pytest
from sinkring.exporter.lower import lower_for
from sinkring.exporter.node import DOMAIN
from sinkring.exporter.targets import TARGETS

from tests.exporter.data import make_graphs
from tests.exporter.lowered_ring import FORMS, TOLERANCE, check, every_form, every_policy, lowered
from tests.exporter.ring_case import POISON_KEY, POISON_VALUE, Call, RingCase, make_call, ring_model, session

# (heads, groups, interleaved, scale): every pair of values occurs, and each case below takes the next one.
VARIANTS = [
    (heads, groups, interleaved, scale)
    for (heads, groups), interleaved, scale in product([(4, 2), (2, 2), (3, 1)], [False, True], [0.35, 1.0])
]


@every_form
@every_policy
@pytest.mark.parametrize(("sinks", "window"), list(product([0, 1, 3], [1, 4])))
@pytest.mark.parametrize("tokens", [1, 5])
def test_static_step(form: str, policy: str, sinks: int, window: int, tokens: int) -> None:
    number = count(7 * sinks + 3 * window + tokens + len(policy))
    for slack, batch in product([tokens - 1, tokens + 2], [1, 2]):
        heads, groups, interleaved, scale = VARIANTS[next(number) % len(VARIANTS)]
        case = RingCase(sinks, window, slack, tokens, batch, heads, groups, policy, interleaved, scale)
        check(form, case, [tokens])


@every_form
@every_policy
@pytest.mark.parametrize(("sinks", "window"), list(product([0, 1, 3], [1, 4])))
def test_chunk_of_any_length(form: str, policy: str, sinks: int, window: int) -> None:
    number = count(5 * sinks + 3 * window + len(policy))
    for slack in (4, 6):
        heads, groups, interleaved, scale = VARIANTS[next(number) % len(VARIANTS)]
        case = RingCase(sinks, window, slack, None, 1, heads, groups, policy, interleaved, scale)
        check(form, case, [1, 2, 5])


@every_form
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_groups_scale_and_pairing(form: str, variant: tuple[int, int, bool, float]) -> None:
    heads, groups, interleaved, scale = variant
    check(form, RingCase(2, 4, 4, 5, 2, heads, groups, "streaming", interleaved, scale), [5])
    check(form, RingCase(2, 4, 0, 1, 2, heads, groups, "streaming", interleaved, scale), [1])


@every_form
def test_a_rotation_of_a_part_of_the_head(form: str) -> None:
    check(form, RingCase(2, 4, 0, 1, policy="streaming", rotary=4), [1])


@every_form
@every_policy
@pytest.mark.parametrize("tokens", [1, None])
def test_controls_fail_loudly(form: str, policy: str, tokens: int | None) -> None:
    """What the checks above must see: a wrong window, a lost sink, a wrong position or slot, a lost clamp."""
    case = RingCase(2, 4, 2, tokens, policy=policy)
    wrapped = case.geometry.capacity
    # Just wrapped, so that the ring is longer than the query's slot number; later, with the window clear of the slots next to the sinks.
    early, late = ([make_call(case, [start], 1, seed) for seed in range(4)] for start in (wrapped, wrapped + 4))

    def error(calls: list[Call], other: RingCase, **shift: int) -> float:
        """shift: what is added to an input."""
        graph = session(lowered(form, other))
        errors = []
        for call in calls:
            changed = {name: call.inputs[name] + step for name, step in shift.items()}
            errors.append(np.abs(graph.run(None, {**call.inputs, **changed})[0] - call.attended).max())
        return float(max(errors))

    assert error(early, case) <= TOLERANCE
    assert error(late, case) <= TOLERANCE
    wrong = {
        "window one longer": error(late, RingCase(2, 5, 1, tokens, policy=policy)),
        "window one shorter": error(late, RingCase(2, 3, 3, tokens, policy=policy)),
        "one sink less": error(late, RingCase(1, 4, 3, tokens, policy=policy)),
        "position from the slot": error(early, case, position=-case.geometry.slots),
        "next slot": error(late, case, write_index=1),
    }
    if policy == "streaming":
        for call in late:
            call.inputs["shift_cos"], call.inputs["shift_sin"] = np.ones((1, 1, 4), np.float32), np.zeros((1, 1, 4), np.float32)
        wrong["sinks not clamped"] = error(late, case)
    for name, value in wrong.items():
        assert not value <= 100 * TOLERANCE, f"{name}: only {value:.2g} off"


@every_form
@every_policy
@pytest.mark.parametrize("tokens", [1, 5, None])
@pytest.mark.parametrize("sinks", [0, 2])
def test_rules_for_all_backends(form: str, policy: str, tokens: int | None, sinks: int) -> None:
    """See the traps of each runtime: these forms are refused, ignored or wrong in one of them."""
    model = lowered(form, RingCase(sinks, 4, 4, tokens, policy=policy))
    assert model.opset_imports == {"": 24}
    nodes = list(model.graph)
    assert {node.domain for node in nodes} == {""}
    assert not any(node.op_type in ("ScatterND", "ScatterElements") for node in nodes)
    for name in ("key_ring", "value_ring"):
        (ring,) = (value for value in model.graph.inputs if value.name == name)
        (reader,) = ring.consumers()
        assert reader.op_type == "TensorScatter", f"{name} is read by {reader.op_type} too"
        assert reader.attributes["axis"].as_int() == -2
        assert "mode" not in reader.attributes or reader.attributes["mode"].as_string() == "linear"
        assert reader.outputs[0].is_graph_output()
        assert reader.outputs[0].name == f"{name}.updated"
    for node in nodes:
        if node.op_type == "Attention":
            assert "is_causal" not in node.attributes or node.attributes["is_causal"].as_int() == 0
            assert len(node.inputs) == 4, "a fifth input is a past, a seventh nonpad_kv_seqlen"
            assert node.attributes["scale"].as_float() != 1.0, "TensorRT copies the key ring at scale 1.0"
            assert {"softcap", "softmax_precision", "qk_matmul_output_mode"}.isdisjoint(node.attributes)
            assert len(node.outputs) == 1


@every_form
def test_scale_one_reaches_attention_as_another_scale(form: str) -> None:
    for node in lowered(form, RingCase(2, 4, 0, 1, scale=1.0)).graph:
        assert node.op_type != "Attention" or node.attributes["scale"].as_float() != 1.0


@every_form
def test_a_ring_of_another_length_is_refused(form: str) -> None:
    model = ring_model(RingCase(2, 4, 0, 1))
    model.graph.node(0).attributes["slots"] = ir.AttrInt64("slots", 5)
    with pytest.raises(ir.passes.PreconditionError, match="C=7"):
        FORMS[form]()(model)


@every_form
def test_streaming_without_angles_is_refused(form: str) -> None:
    model = ring_model(RingCase(2, 4, 0, 1))
    model.graph.node(0).attributes["policy"] = ir.AttrString("policy", "streaming")
    with pytest.raises(ir.passes.PreconditionError, match="shift_cos"):
        FORMS[form]()(model)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_lower_for_leaves_its_input_alone(target: str) -> None:
    """Both targets are lowered from one simplified graph, so the first must not change it for the second."""
    cache_dtype = "float16" if TARGETS[target].only_float16 else "float32"
    model = ring_model(RingCase(2, 4, 0, 1, policy="streaming", cache_dtype=cache_dtype))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    first = ir.to_proto(lower_for(TARGETS[target], "decode", model)).SerializeToString(deterministic=True)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert ir.to_proto(lower_for(TARGETS[target], "decode", model)).SerializeToString(deterministic=True) == first
    assert DOMAIN not in lower_for(TARGETS[target], "decode", model).opset_imports


@pytest.mark.parametrize("name", make_graphs.NAMES)
def test_graph_text(name: str) -> None:
    """The smallest graphs as text, so that a change of a pass shows in review what it does. Made by tests/exporter/data/make_graphs.py."""
    assert make_graphs.text(name) == make_graphs.path(name).read_text(encoding="utf-8")


def test_poison_is_where_it_should_be() -> None:
    """The check of masked slots is only worth something if most slots of a young stream hold poison, with huge keys too."""
    calls = [make_call(RingCase(3, 4, 2, 1), [0], 1, seed) for seed in range(4)]
    assert all((call.value_ring >= POISON_VALUE / 2).mean() > 0.8 for call in calls)
    assert any((np.abs(call.key_ring) >= POISON_KEY / 2).mean() > 0.4 for call in calls)
