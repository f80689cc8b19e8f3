"""Streams: what they refuse and survive. A refused call changes nothing; an interrupted one leaves a stream that can go on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream
from sinkring.runtime.errors import CapacityError, InputError

from tests.runtime.stream_case import IDS, Interrupted, V, assert_close, logits_after, snapshot, tokens_until

BAD_IDS = {
    "empty": [],
    "empty array": np.empty(0, np.int64),
    "negative": [1, -1],
    "one past the vocabulary": [1, V],
    "past int64": [1, 2**63],
    "past every int": [1, 2**100],
    "mixed signs past int64": [-1, 2**63],
    "floats": [1.0, 2.0],
    "bools": [True, False],
    "two dimensions": [[1, 2], [3, 4]],
    "ragged": [[1], [2, 3]],
    "a scalar": 5,
    "text": "hello",
    "strings": ["1", "2"],
    "None": None,
    "None inside": [1, None],
    "a generator": (token for token in (1, 2)),
    "a dictionary": {1: 2},
    "a NaN": [float("nan")],
}


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS)
@pytest.mark.parametrize("all_logits", [False, True])
def test_bad_ids_are_refused_and_change_nothing(stream: Stream, ids: Any, all_logits: bool) -> None:
    stream.feed(IDS[:20])
    next(stream.generate(3))
    before = snapshot(stream)
    with pytest.raises(InputError, match=r"^feed: ") as raised:
        stream.feed(ids, all_logits=all_logits)
    assert "\n" not in str(raised.value)
    assert snapshot(stream) == before


def test_an_id_outside_the_vocabulary_is_named_with_its_place(stream: Stream) -> None:
    with pytest.raises(InputError, match=r"ids\[2\] is 97, outside the vocabulary \[0, 97\)"):
        stream.feed([1, 2, 97, -4])


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1},
        {"max_tokens": 2.5},
        {"max_tokens": "3"},
        {"max_tokens": None},
        {"max_tokens": True},
        {"stop_ids": 2},
        {"stop_ids": "abc"},
        {"stop_ids": [1.5]},
        {"stop_ids": [V]},
        {"stop_ids": [-1]},
        {"stop_ids": [None]},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"seed": -1},
        {"seed": "x"},
    ],
    ids=str,
)
def test_bad_options_are_refused_before_the_loop(stream: Stream, options: dict[str, Any]) -> None:
    stream.feed(IDS[:20])
    before = snapshot(stream)
    with pytest.raises(InputError, match=next(iter(options))):
        stream.generate(**{"max_tokens": 4, **options})
    assert snapshot(stream) == before


def test_an_empty_stream_has_nothing_to_continue(stream: Stream) -> None:
    with pytest.raises(InputError, match="empty"):
        stream.generate(1)
    stream.feed([1])
    stream.reset()
    with pytest.raises(InputError, match="empty"):
        stream.generate(1)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}], ids=["greedy", "sampled", "top-k"])
def test_logits_that_are_not_finite_emit_nothing(stream: Stream, options: dict[str, Any]) -> None:
    stream.feed(IDS[:20])
    loop = stream.generate(5, stop_ids=(), **options)
    first = next(loop)
    backend = stream._decoder.backend
    backend.write_row(stream.row, {name: np.full_like(row, np.nan) for name, row in backend.read_row(stream.row).items()})
    with pytest.raises(InputError, match="not finite"):
        next(loop)
    assert (stream.position, stream._history[-1]) == (21, first)
    stream.reset()
    assert np.isfinite(stream.feed(IDS[:20])).all()


def test_a_loop_does_not_outlive_a_reset(stream: Stream) -> None:
    stream.feed(IDS[:7])
    loop = stream.generate(9)
    next(loop)
    stream.reset()
    with pytest.raises(InputError, match="reset"):
        next(loop)
    stream.feed(IDS[:7])
    list(stream.generate(2))
    loop = stream.generate(9)
    next(loop)
    stream.reset()
    stream.feed(IDS[:7])
    before = snapshot(stream)
    with pytest.raises(InputError, match="reset"):
        next(loop)
    assert snapshot(stream) == before


def test_a_loop_does_not_outlive_other_options(stream: Stream) -> None:
    stream.feed(IDS[:7])
    old = stream.generate(9)
    next(old)
    next(stream.generate(9, temperature=1.0))
    with pytest.raises(InputError, match="other options"):
        next(old)


def test_a_closed_stream_refuses_everything_but_close(stream: Stream) -> None:
    stream.feed(IDS[:7])
    loop = stream.generate(9)
    next(loop)
    stream.close()
    stream.close()
    calls: list[Callable[[], object]] = [lambda: stream.feed([1]), lambda: stream.generate(1), stream.reset, lambda: next(loop)]
    for call in calls:
        with pytest.raises(CapacityError, match="closed"):
            call()


def test_the_position_limit_is_met_before_anything_is_written(stream: Stream) -> None:
    limit = stream._decoder.manifest.position_limit
    stream.feed(IDS[:20])
    stream._fed = limit - 3
    before = snapshot(stream)
    for all_logits in (False, True):
        with pytest.raises(CapacityError, match=str(limit)):
            stream.feed(IDS[:4], all_logits=all_logits)
    assert snapshot(stream) == before
    assert np.isfinite(stream.feed(IDS[:3])).all()
    assert stream.position == limit
    stream.generate(1)
    before = snapshot(stream)
    with pytest.raises(CapacityError):
        stream.feed([1])
    with pytest.raises(CapacityError):
        next(stream.generate(1))
    assert snapshot(stream) == before


def test_generating_stops_at_the_position_limit(stream: Stream) -> None:
    limit = stream._decoder.manifest.position_limit
    stream.feed(IDS[:20])
    stream._fed = limit - 3
    tokens = tokens_until(CapacityError, stream.generate(9, stop_ids=()))
    assert (len(tokens), stream.position) == (3, limit)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_interrupted_feed_leaves_a_stream_that_can_go_on(decoder: Decoder, stream: Stream, call: int, after: bool) -> None:
    penalty: dict[str, Any] = {"repetition_penalty": 1.5, "temperature": 1.0}
    said = [*IDS[:21].tolist()]
    stream.feed(said)
    said.append(next(stream.generate(1, **penalty)))
    whole = decoder.backend
    decoder.backend = Interrupted(whole, call, after)
    with pytest.raises(KeyboardInterrupt):
        stream.feed(IDS[21:40])
    decoder.backend = whole
    # `position` says what has been taken in; the rest, and other tokens than those that were in flight, can be fed.
    taken = [*said, *IDS[21 : 21 + stream.position - 22].tolist()]
    assert len(taken) == stream.position
    assert list(stream._history) == taken
    got = stream.feed(IDS[50:])
    tokens = list(stream.generate(12, **penalty))
    stream.reset()
    assert_close(got, stream.feed([*taken, *IDS[50:]]))
    state = snapshot(stream)["history"]
    assert state == [*taken, *IDS[50:].tolist()]
    assert len(tokens) == 12


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_loop_loses_and_doubles_no_token(decoder: Decoder, stream: Stream, after: bool) -> None:
    stream.feed(IDS[:20])
    expected = list(stream.generate(12, stop_ids=()))
    logits_after(stream, IDS[:20])
    whole = decoder.backend
    decoder.backend = Interrupted(whole, 4, after)
    tokens = tokens_until(KeyboardInterrupt, stream.generate(12, stop_ids=()))
    decoder.backend = whole
    assert stream.position == 20 + len(tokens)
    assert [*tokens, *stream.generate(12 - len(tokens), stop_ids=())] == expected
