"""Streams: what they return, refuse and survive. Ring: S = 2, W = 4, C = 16; all lengths go past the wrap."""

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError, InputError

V = 97
IDS = np.random.default_rng(5).integers(0, V, 60)
# float32 sums in another order; the logits' scale is about 3.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def decoder(tiny_bundle: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def stream(decoder: Decoder) -> Iterator[Stream]:
    with decoder.stream() as taken:
        yield taken


def assert_close(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert got.shape == expected.shape
    error = np.abs(got - expected)
    assert error.max() <= TOLERANCE, f"max {error.max():.2e}, mean {error.mean():.2e}; a tolerance of {error.max():.1e} would pass"


def logits_after(stream: Stream, ids: Any) -> NDArray[np.float32]:
    stream.reset()
    return stream.feed(ids)


def snapshot(stream: Stream) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    rows = stream._decoder.backend.read_row(stream.row)
    return {
        "position": stream.position,
        "fed": stream._fed,
        "pending": list(stream._pending),
        "history": list(stream._history),
        "logits": stream._logits.tobytes(),
        "rows": {name: row.tobytes() for name, row in rows.items()},
        "sampler": stream._sampler and stream._sampler.state(),
    }


def test_feed_returns_the_last_row_or_all_rows(stream: Stream) -> None:
    every = stream.feed(IDS[:9], all_logits=True)
    stream.reset()
    last = stream.feed(IDS[:9])
    assert (every.dtype, every.shape) == (np.float32, (9, V))
    assert (last.dtype, last.shape) == (np.float32, (V,))
    assert_close(every[-1], last)
    assert np.ptp(last) > 1, "logits so flat would hide any fault"


def test_what_feed_returned_is_never_overwritten(stream: Stream) -> None:
    first, rows = stream.feed(IDS[:5]), stream.feed(IDS[5:9], all_logits=True)
    before = first.copy(), rows.copy()
    stream.feed(IDS[9:30])
    stream.reset()
    np.testing.assert_array_equal(first, before[0])
    np.testing.assert_array_equal(rows, before[1])


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 12, 17])
def test_any_cut_gives_the_same_logits(stream: Stream, cut: int) -> None:
    whole = stream.feed(IDS, all_logits=True)
    stream.reset()
    parts = [stream.feed(IDS[start : start + cut], all_logits=True) for start in range(0, len(IDS), cut)]
    assert_close(np.concatenate(parts), whole)


def test_a_token_that_left_the_window_does_not_count_and_a_sink_does(stream: Stream) -> None:
    """The control of every comparison here: what must change the logits changes them far beyond the tolerance."""
    base = logits_after(stream, IDS)
    for position, counts in ((1, True), (len(IDS) - 1 - 4 * 2, False), (len(IDS) - 4, True)):
        other = IDS.copy()
        other[position] = (other[position] + 1) % V
        # Two layers reach back twice the window, so only what lies further than 2 * (W - 1) is gone.
        assert (np.abs(logits_after(stream, other) - base).max() > 100 * TOLERANCE) == counts, position


@pytest.mark.parametrize(
    "ids",
    [[3, 4, 5], (3, 4, 5), range(3, 6), np.array([3, 4, 5], np.int32), np.array([3, 4, 5], np.uint8), np.array([3, 0, 4, 0, 5])[::2]],
    ids=["list", "tuple", "range", "int32", "uint8", "strided"],
)
def test_every_kind_of_ids_is_the_same(stream: Stream, ids: Any) -> None:
    np.testing.assert_array_equal(stream.feed(ids), logits_after(stream, np.array([3, 4, 5])))


def test_the_ids_are_not_kept_by_reference(stream: Stream) -> None:
    ids = np.array([3, 4, 5])
    stream.feed(ids)
    ids[:] = 0
    assert list(stream._history) == [3, 4, 5]


def tokens_until(error: type[BaseException], loop: Iterator[int]) -> list[int]:
    """What the loop yields before it raises `error`."""
    tokens: list[int] = []
    with pytest.raises(error):
        collections.deque(map(tokens.append, loop), maxlen=0)
    return tokens


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


def test_numpy_numbers_are_taken_as_options(stream: Stream) -> None:
    stream.feed(IDS[:5])
    expected = list(stream.generate(3, stop_ids=()))
    logits_after(stream, IDS[:5])
    assert list(stream.generate(np.int64(3), stop_ids=np.array([], np.int64))) == expected  # type: ignore[arg-type]


def test_position_counts_a_token_once_it_is_yielded(stream: Stream) -> None:
    stream.feed(IDS[:5])
    for count, _ in enumerate(stream.generate(20), start=1):
        assert stream.position == 5 + count
    assert stream.position == 25


@pytest.mark.parametrize("taken", [1, 2, 13])
def test_breaking_out_and_feeding_on_equals_feeding_everything(stream: Stream, taken: int) -> None:
    stream.feed(IDS[:7])
    tokens: list[int] = []
    for token in stream.generate(50):
        tokens.append(token)
        if len(tokens) == taken:
            break
    got = stream.feed(IDS[7:16])
    assert stream.position == 16 + taken
    assert_close(got, logits_after(stream, [*IDS[:7], *tokens, *IDS[7:16]]))


def test_all_logits_after_generate_are_only_those_of_the_new_ids(stream: Stream) -> None:
    stream.feed(IDS[:7])
    token = next(stream.generate(1))
    got = stream.feed(IDS[7:12], all_logits=True)
    assert got.shape == (5, V)
    stream.reset()
    assert_close(got, stream.feed([*IDS[:7], token, *IDS[7:12]], all_logits=True)[8:])


def test_feeding_inside_the_loop_belongs_to_the_stream(stream: Stream) -> None:
    stream.feed(IDS[:7])
    loop = stream.generate(4)
    first = next(loop)
    stream.feed(IDS[7:10])
    second = next(loop)
    assert second == int(logits_after(stream, [*IDS[:7], first, *IDS[7:10]]).argmax())


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3}], ids=["greedy", "sampled"])
def test_two_generate_calls_are_one(stream: Stream, options: dict[str, Any]) -> None:
    stream.feed(IDS[:7])
    whole = list(stream.generate(30, **options))
    logits_after(stream, IDS[:7])
    assert [*stream.generate(11, **options), *stream.generate(0, **options), *stream.generate(19, **options)] == whole


def test_a_seed_repeats_and_another_does_not(stream: Stream) -> None:
    runs = []
    for seed in (1, 1, 2):
        logits_after(stream, IDS[:7])
        runs.append(list(stream.generate(20, temperature=1.0, seed=seed)))
    assert runs[0] == runs[1] != runs[2]


def test_the_sampler_sees_every_turn(stream: Stream) -> None:
    """A penalty that forbids what was said: fed before the first call, fed between two, and generated tokens all count."""
    penalty = {"repetition_penalty": 1000.0}
    stream.feed([5, 6])
    first = list(stream.generate(10, **penalty))
    stream.feed([7, 8])
    second = list(stream.generate(10, **penalty))
    assert len({5, 6, 7, 8, *first, *second}) == 24
    # The same tokens fed from outside leave the sampler where generating them does.
    stream.reset()
    stream.feed([5, 6, *first, 7, 8])
    assert list(stream.generate(10, **penalty)) == second


def test_a_stop_token_is_not_yielded_but_is_part_of_the_stream(stream: Stream) -> None:
    stream.feed(IDS[:7])
    whole = list(stream.generate(8, stop_ids=()))
    stop = whole[4]
    expected = whole[: whole.index(stop)]
    logits_after(stream, IDS[:7])
    assert list(stream.generate(8, stop_ids=[stop])) == expected
    assert stream.position == 7 + len(expected) + 1
    got = stream.feed(IDS[7:10])
    assert_close(got, logits_after(stream, [*IDS[:7], *expected, stop, *IDS[7:10]]))


def test_reset_equals_fresh_after_poison(tiny_bundle: Path, stream: Stream) -> None:
    stream.feed(IDS[:30])
    list(stream.generate(5, temperature=1.0))
    backend = stream._decoder.backend
    for poison in (np.nan, np.inf, -np.inf):
        backend.write_row(stream.row, {name: np.full_like(row, poison) for name, row in backend.read_row(stream.row).items()})
        stream._logits[:] = poison
        stream.reset()
        assert stream.position == 0
        with open_bundle(tiny_bundle, threads=1) as other:
            fresh = other.stream()
            assert snapshot(stream) == snapshot(fresh)
            np.testing.assert_array_equal(stream.feed(IDS, all_logits=True), fresh.feed(IDS, all_logits=True))
            options: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.2}
            assert list(stream.generate(20, **options)) == list(fresh.generate(20, **options))


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


def test_loops_of_equal_options_take_turns(stream: Stream) -> None:
    stream.feed(IDS[:7])
    whole = list(stream.generate(6, temperature=1.0))
    logits_after(stream, IDS[:7])
    one, two = stream.generate(3, temperature=1.0), stream.generate(3, temperature=1.0)
    assert [next(loop) for loop in (one, two, one, two, two, one)] == whole


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


class _Interrupted:
    """A backend whose n-th call is interrupted, before it runs or after."""

    def __init__(self, backend: Any, call: int, after: bool) -> None:
        self._backend, self._left, self._after = backend, call, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _run(self, call: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise KeyboardInterrupt
        result = call()
        if self._left == 0:
            raise KeyboardInterrupt
        return result

    def decode(self) -> None:
        self._run(self._backend.decode)

    def prefill(self, *arguments: Any) -> Any:
        return self._run(lambda: self._backend.prefill(*arguments))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_interrupted_feed_leaves_a_stream_that_can_go_on(decoder: Decoder, stream: Stream, call: int, after: bool) -> None:
    penalty: dict[str, Any] = {"repetition_penalty": 1.5, "temperature": 1.0}
    said = [*IDS[:21].tolist()]
    stream.feed(said)
    said.append(next(stream.generate(1, **penalty)))
    whole = decoder.backend
    decoder.backend = _Interrupted(whole, call, after)
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
    decoder.backend = _Interrupted(whole, 4, after)
    tokens = tokens_until(KeyboardInterrupt, stream.generate(12, stop_ids=()))
    decoder.backend = whole
    assert stream.position == 20 + len(tokens)
    assert [*tokens, *stream.generate(12 - len(tokens), stop_ids=())] == expected
