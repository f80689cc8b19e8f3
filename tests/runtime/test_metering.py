"""The meter counts the model's time, and only that."""

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from sinkring.runtime.metering import Meter
from sinkring.runtime.stream import Stream


class SlowStream:
    """Takes 0.05 s to feed."""

    def feed(self, ids: list[int]) -> None:
        time.sleep(0.05)


def slow_tokens(count: int, step_seconds: float) -> Iterator[int]:
    """As `Stream.generate`: the first token costs no step."""
    for token in range(count):
        if token:
            time.sleep(step_seconds)
        yield token


def test_nothing_is_measured_before_anything_has_run() -> None:
    meter = Meter()
    assert (meter.tokens_per_second, meter.fed_tokens_per_second) == (None, None)
    assert list(meter.count(iter([7]))) == [7]
    assert (meter.generated_tokens, meter.tokens_per_second) == (1, None)


def test_steps_are_timed_and_the_consumer_is_not() -> None:
    meter = Meter()
    for _ in meter.count(slow_tokens(5, 0.02)):
        time.sleep(0.05)
    assert (meter.generated_tokens, meter.steps) == (5, 4)
    assert 4 * 0.02 <= meter.step_seconds < 4 * 0.02 + 5 * 0.05
    assert meter.tokens_per_second == pytest.approx(4 / meter.step_seconds)


def test_turns_add_up() -> None:
    meter = Meter()
    stream = cast(Stream, cast(Any, SlowStream()))
    for _ in range(2):
        meter.feed(stream, [1, 2, 3])
        list(meter.count(slow_tokens(3, 0.01)))
    assert (meter.fed_tokens, meter.generated_tokens, meter.steps) == (6, 6, 4)
    assert meter.fed_seconds >= 0.1
    assert meter.fed_tokens_per_second == pytest.approx(6 / meter.fed_seconds)
