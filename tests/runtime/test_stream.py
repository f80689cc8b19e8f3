"""Streams: what they return, and that nothing but their ids counts. Ring: S = 2, W = 4, C = 16; all lengths go past the wrap."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Stream, open_bundle

from tests.runtime.stream_case import IDS, TOLERANCE, V, assert_close, logits_after, snapshot


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


def test_loops_of_equal_options_take_turns(stream: Stream) -> None:
    stream.feed(IDS[:7])
    whole = list(stream.generate(6, temperature=1.0))
    logits_after(stream, IDS[:7])
    one, two = stream.generate(3, temperature=1.0), stream.generate(3, temperature=1.0)
    assert [next(loop) for loop in (one, two, one, two, two, one)] == whole
