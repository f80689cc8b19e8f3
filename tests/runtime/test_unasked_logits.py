"""Chunks whose logits nobody asked for: none are computed, and the stream is the same. S = 2, W = 4, C = 16 and chunks of 4."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import InputError, NumericalError

from tests.exporter.tiny_bundle import shared_tiny
from tests.runtime.stream_case import IDS, Interrupted, V, assert_close, logits_after

CAPACITY, LAYERS = 16, 2


@pytest.fixture(scope="module")
def reference(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """With no more slack than chunks of 4 need: S = 2, W = 3, C = 8."""
    with open_bundle(shared_tiny(tmp_path_factory, sinks=2, window=3, chunk=4), threads=1) as opened:
        assert (opened.shortest_capacity, opened.slack_tokens) == (8, 3)
        yield opened


@contextmanager
def interrupted(decoder: Decoder, call: int, after: bool) -> Iterator[None]:
    """What is inside is interrupted in the n-th call of the backend."""
    whole = decoder.backend
    decoder.backend = Interrupted(whole, call, after)  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        decoder.backend = whole


@contextmanager
def after_call(decoder: Decoder, call: int, then: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is inside runs with `then` called once the backend's n-th prefill is over."""
    prefill, calls = decoder.backend.prefill, [0]

    def watched(*arguments: Any) -> np.ndarray:
        logits = prefill(*arguments)
        calls[0] += 1
        if calls[0] == call:
            then()
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(decoder.backend, "prefill", watched)
        yield
    assert calls[0] > call


def spoil(stream: Stream, slot: int) -> None:
    """What a token that has overflowed in the first layer leaves in the caches."""
    backend = stream._decoder.backend
    rows = backend.read_row(stream.row)
    for row in rows.values():
        row[:, :, slot] = np.nan
    backend.write_row(stream.row, rows)


def test_only_the_last_chunk_is_asked_for_logits(reference: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    prefill = reference.backend.prefill

    def counted(row: int, fed: np.ndarray, position: int, write_index: tuple[int, ...], wanted: int) -> np.ndarray:
        logits = prefill(row, fed, position, write_index, wanted)
        assert logits.shape == (wanted, V)
        asked.append((len(fed), wanted))
        return logits

    monkeypatch.setattr(reference.backend, "prefill", counted)
    with reference.stream() as stream:
        last = stream.feed(IDS)
        assert [wanted for _, wanted in asked] == [0] * (len(asked) - 1) + [1]
        assert len(asked) > len(IDS) / 4, "no chunk was cut at the ring's end"
        stream.reset()
        asked.clear()
        every = stream.feed(IDS, all_logits=True)
        assert [wanted for _, wanted in asked] == [length for length, _ in asked]
    assert_close(last, every[-1])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [2, 3, 5, 9, 12])
def test_an_interrupted_feed_can_be_sampled_from(decoder: Decoder, stream: Stream, reference: Decoder, call: int, after: bool) -> None:
    """The chunk before had no logits: they are made anew, as after a rollback, in the stream and in a fork of it."""
    first = logits_after(stream, IDS[:3])
    with interrupted(decoder, call, after):
        stream.feed(IDS[3:])
    taken = stream.position
    assert 3 < taken < len(IDS)
    record, tensors = stream.capture()
    # A chunk of one token went through the decode graph, which always gives them.
    assert record["logits_stand"] == (call == 5)
    with reference.stream() as fresh:
        expected = fresh.feed(IDS[:taken])
        tokens = list(fresh.generate(9, stop_ids=()))
    assert stream.sample() == int(expected.argmax())
    assert_close(stream._logits, expected)
    assert np.abs(expected - first).max() > 0.1, "the logits before the call would do as well"
    assert list(stream.generate(9, stop_ids=())) == tokens
    stream.install(record, tensors)
    assert list(stream.generate(9, stop_ids=())) == tokens


@pytest.mark.parametrize("after", [False, True])
def test_what_the_interrupted_chunk_overwrote_is_gone(tight: Decoder, after: bool) -> None:
    """A whole chunk takes the oldest token that the last one saw. Its logits are refused, whatever comes next is right."""
    with tight.stream() as stream:
        with interrupted(tight, 3, after):
            stream.feed(IDS[:30])
        assert stream.position == 8
        for call in (stream.sample, lambda: stream.generate(1), lambda: stream.extend(2)):
            with pytest.raises(InputError, match="an interrupted call may have overwritten what the last token saw; feed a token first"):
                call()
        got = stream.feed(IDS[50:59])
        stream.reset()
        assert_close(got, stream.feed([*IDS[:8], *IDS[50:59]]))
        # A shorter one does not.
        stream.reset()
        with interrupted(tight, 3, after):
            stream.feed(IDS[:11])
        assert stream.position == 8
        assert stream.sample() == int(logits_after(stream, IDS[:8]).argmax())


@pytest.mark.parametrize("slot", [1, 5])
def test_a_fault_in_an_early_chunk_stops_the_stream_at_the_end(
    decoder: Decoder, stream: Stream, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink stays for ever; a token of the ring is seen, through the layers, until all that saw it is overwritten."""
    length = len(IDS) if slot == 1 else 8 + 3 * 4
    before, says = decoder.metrics().numerical_alarms, f"the logits at position {length} are not finite.*nothing of it was given out"
    with after_call(decoder, 2, lambda: spoil(stream, slot), monkeypatch), pytest.raises(NumericalError, match=says):
        stream.feed(IDS[:length])
    assert decoder.metrics().numerical_alarms == before + 1
    for call in (stream.sample, lambda: stream.feed([1]), lambda: stream.generate(1), lambda: stream.rollback(1)):
        with pytest.raises(NumericalError):
            call()
    stream.reset()
    assert np.isfinite(stream.feed(IDS)).all()


def test_a_fault_that_no_window_reaches_has_left_nothing(decoder: Decoder, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """No logits were computed that it touched, and those at the end are the same to the bit."""
    expected = logits_after(stream, IDS)
    stream.reset()
    with after_call(decoder, 2, lambda: spoil(stream, 5), monkeypatch):
        got = stream.feed(IDS)
    np.testing.assert_array_equal(got, expected)
    assert len(IDS) > 8 + LAYERS * CAPACITY
