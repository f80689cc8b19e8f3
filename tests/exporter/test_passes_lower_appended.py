"""RingAttention as a graph that only reads the rings, run in ONNX Runtime: against plain attention, with what each mask is for."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from sinkring.exporter.passes import lowering
from sinkring.exporter.passes.lower_appended import LowerToAppendedAttention
from sinkring.exporter.passes.older_operators import OlderOperators
from sinkring.exporter.passes.ring_mask import write_kept, write_new_validity

from tests.exporter.lowered_ring import TOLERANCE, every_policy, two_layers
from tests.exporter.ring_case import Call, RingCase, make_call, ring_model, session

SLOPES = (0.5, 0.25, 0.7, 0.05)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"interleaved": True, "groups": 4},
    "part of the head": {"rotary": 4, "groups": 1},
    "softcap": {"softcap": 4.0},
    "sink logits": {"sink_logits": True},
    "ALiBi": {"rotary": 0, "slopes": SLOPES},
    "all of them": {"rotary": 4, "interleaved": True, "softcap": 4.0, "sink_logits": True, "slopes": SLOPES, "scale": 1.0},
}
HALF_TOLERANCE = 3e-2  # float16 keys are wrong by 2**-12 of themselves: see test_passes_lower_kinds


def lowered(model: ir.Model) -> ir.Model:
    LowerToAppendedAttention()(model)
    OlderOperators()(model)
    model.opset_imports[""], model.ir_version = 20, 9
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def error(outputs: list[np.ndarray], call: Call) -> float:
    """Largest difference in what is attended to. Asserts that the rows are the new ones, bit for bit, as the ring stores them."""
    for row, name, ring in zip(outputs[1:], ("key", "value"), ("key_ring", "value_ring"), strict=True):
        np.testing.assert_array_equal(row, call.inputs[name].astype(call.inputs[ring].dtype))
    return float(np.abs(outputs[0] - call.attended).max())


def calls(case: RingCase, tokens: int) -> list[Call]:
    """One from each start, each row of the batch from another one."""
    starts = case.starts(tokens)
    rows = [[starts[(index + 3 * row) % len(starts)] for row in range(case.batch)] for index in range(len(starts))]
    return [make_call(case, each, tokens, seed=index) for index, each in enumerate(rows)]


def worst(case: RingCase, lengths: list[int]) -> float:
    graph = session(lowered(ring_model(case)))
    return max(error(graph.run(None, call.inputs), call) for tokens in lengths for call in calls(case, tokens))


@every_policy
@pytest.mark.parametrize("kind", KINDS)
def test_attends_as_plain_attention_does(policy: str, kind: str) -> None:
    """Chunks longer than the window and than sinks and window together among them: a new sink may be out of a later query's window."""
    for (sinks, window), (tokens, batch) in product([(0, 1), (3, 1), (1, 4), (3, 4)], [(1, 2), (6, 2), (None, 1)]):
        slack = (tokens or 6) - 1 if sinks else 7
        case = RingCase(sinks, window, slack, tokens, batch, policy=policy, **KINDS[kind])
        found = worst(case, [tokens] if tokens else [1, 2, 6])
        assert found <= TOLERANCE, f"{case}: {found:.2g} off"


@every_policy
@pytest.mark.parametrize("tokens", [1, None])
def test_float16_caches(policy: str, tokens: int | None) -> None:
    """What a query sees of its own call's rows is what the caches will hold."""
    for kind in ("plain", "all of them"):
        case = RingCase(2, 4, 4, tokens, policy=policy, cache_dtype="float16", **KINDS[kind])
        assert worst(case, [tokens or 3]) <= HALF_TOLERANCE


def _next_slots(into: Any, a: Any, write_index: Any, tokens: Any) -> Any:
    return write_kept(into, a, into.op("Add", write_index, into.constant("i64.one", np.array(1, np.int64))), tokens)


def _everything_new(into: Any, a: Any, new: Any) -> Any:
    valid = write_new_validity(into, a, new)
    return into.op("Or", valid, into.op("Not", valid))


MASKS: dict[str, tuple[str, Callable[..., Any], int]] = {
    "the slots behind those that are replaced are masked": ("write_kept", _next_slots, 1),
    "the same for a chunk": ("write_kept", _next_slots, 5),
    "queries see rows behind them": ("write_new_validity", _everything_new, 5),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_wrong_mask_is_loud(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, wrong, tokens = MASKS[name]
    case = RingCase(2, 4, 4, tokens)
    assert worst(case, [tokens]) <= TOLERANCE
    monkeypatch.setattr(lowering, attribute, wrong)
    assert not worst(case, [tokens]) <= 100 * TOLERANCE


def test_layers_of_several_geometries_have_masks_of_their_own() -> None:
    first, second = RingCase(2, 4, 4, 5, rotary=0, slopes=SLOPES), RingCase(1, 3, 5, 5, rotary=0, slopes=SLOPES[::-1])
    graph = session(lowered(two_layers(first, second, share=False)))
    made = [make_call(case, case.starts(5)[-2:-1], 5) for case in (first, second)]
    inputs = {f"{name}.{index}": array for index, call in enumerate(made) for name, array in call.inputs.items()}
    outputs = graph.run(None, {value.name: inputs[value.name] for value in graph.get_inputs()})
    assert [value.name for value in graph.get_outputs()][1] == "key_ring.0.rows"
    for index, call in enumerate(made):
        assert error(outputs[3 * index : 3 * index + 3], call) <= TOLERANCE
