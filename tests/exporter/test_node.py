"""The node's reference in numpy against plain attention over RingGeometry.attended."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from sinkring.exporter.node import RingAttentionAttributes, attended_slots, ring_attention
from sinkring.runtime.ring import RingGeometry

from tests.exporter.ring_case import RingCase, make_call

# Inputs are float32 roundings of what the float64 check starts from: a score of 50 errs by 50 * 2**-23, and a weight by that share of it.
TOLERANCE = 5e-5


@pytest.mark.parametrize("policy", ["native", "streaming"])
@pytest.mark.parametrize(("sinks", "window", "tokens"), list(product([0, 1, 3], [1, 4], [1, 5])))
def test_reference_is_plain_attention_over_the_attended_tokens(sinks: int, window: int, tokens: int, policy: str) -> None:
    for slack, batch, interleaved in product([tokens - 1, tokens + 1], [1, 2], [False, True]):
        case = RingCase(sinks, window, slack, tokens, batch, policy=policy, interleaved=interleaved)
        starts = case.starts(tokens)
        for index, start in enumerate(starts):
            call = make_call(case, [start, starts[index - 1]][:batch], tokens)
            error = call.error(list(ring_attention(case.attributes, **call.inputs)))
            assert error <= TOLERANCE, f"{case} from {start}: {error:.2g}"


KINDS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 4.0},
    "sink logits": {"sink_logits": True},
    "ALiBi": {"rotary": 0, "slopes": (0.5, 0.25, 0.7, 0.05)},
    "all": {"rotary": 4, "interleaved": True, "softcap": 4.0, "sink_logits": True, "slopes": (0.5, 0.25, 0.7, 0.05)},
}


@pytest.mark.parametrize("policy", ["native", "streaming"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sinks", "tokens"), [(0, 1), (3, 1), (3, 5)])
def test_reference_of_each_kind_is_plain_attention(kind: str, policy: str, sinks: int, tokens: int) -> None:
    case = RingCase(sinks, 4, 4, tokens, 2, policy=policy, **KINDS[kind])
    plain = replace(case.attributes, softcap=0.0, alibi_slopes=(0.0,) * len(case.slopes))
    starts = case.starts(tokens)
    for index, start in enumerate(starts):
        call = make_call(case, [start, starts[index - 1]], tokens)
        inputs = {name: array for name, array in call.inputs.items() if name != "sink_logits"}
        assert call.error(list(ring_attention(case.attributes, **call.inputs))) <= TOLERANCE
        # The control; a query that sees only itself has the same result with any score.
        alone = max(len(case.geometry.attended(token)) for token in (start, starts[index - 1])) == 1 and not case.sink_logits
        assert alone or call.error(list(ring_attention(plain, **inputs))) > 100 * TOLERANCE


def test_reference_reads_what_caches_of_another_type_hold() -> None:
    case = RingCase(3, 4, 4, 5, 2, policy="streaming", cache_dtype="float16")
    call = make_call(case, case.starts(5)[-2:], 5)
    attended, keys, values = ring_attention(case.attributes, **call.inputs)
    assert (attended.dtype, keys.dtype, values.dtype) == (np.float32, np.float16, np.float16)
    # float16 keys are wrong by 2**-12 of themselves: of a score of 30 that is 0.007, and so is a weight's error.
    assert TOLERANCE < call.error([attended, keys, values]) <= 3e-2


@pytest.mark.parametrize(("sinks", "window", "slack"), list(product([0, 1, 2, 5], [1, 3, 4], [0, 1, 3])))
def test_attended_slots_are_those_of_the_attended_tokens(sinks: int, window: int, slack: int) -> None:
    ring = RingGeometry(sinks, window, window + slack)
    attributes = RingAttentionAttributes(sinks, window, ring.slots, 1.0, "native")
    for position in [*range(5 * ring.capacity), *range(1 << 40, (1 << 40) + ring.capacity)]:
        expected = [ring.slot(token) for token in ring.attended(position)]
        assert sorted(attended_slots(attributes, position, ring.slot(position))) == sorted(expected)


@pytest.mark.parametrize(
    "wrong",
    [{"window": 3}, {"window": 5}, {"sinks": 0}, {"policy": "native"}, {"scale": 0.4}, {"interleaved": True}],
    ids=lambda wrong: next(iter(wrong)) + str(next(iter(wrong.values()))),
)
def test_a_wrong_attribute_shows(wrong: dict) -> None:
    case = RingCase(sinks=1, window=4, slack=2, tokens=1, policy="streaming")
    call = make_call(case, [23], 1)
    right = case.attributes
    attributes = RingAttentionAttributes(**{**right.__dict__, **wrong})
    if "sinks" in wrong:  # the same buffer, its first slot taken for one of the ring
        attributes = RingAttentionAttributes(**{**right.__dict__, "sinks": 0, "slots": right.slots + 1})
    attended = ring_attention(attributes, **call.inputs)[0]
    assert not np.abs(attended - call.attended).max() <= 100 * TOLERANCE
