"""Taking tokens back: its limits, what it refuses, and what it does to pending tokens, history and sampler. Ring: S = 2, W = 4, C = 16.

That what follows a rollback is right, against the oracle, is in tests/parity/test_rollback.py.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError, InputError

from tests.runtime.stream_case import IDS, V, assert_close, snapshot

# M = 14, W = 4.
CAPACITY, SLACK = 16, 10


@pytest.fixture(scope="module")
def reference(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    """Its streams are fed afresh; with three rows it runs another graph for single tokens than the decoder under test."""
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


def logits_of(reference: Decoder, ids: Any) -> np.ndarray:
    with reference.stream() as fresh:
        return fresh.feed(ids)


def takes_back_at_most(stream: Stream, limit: int) -> None:
    """One more is refused with the limit in the message, and changes nothing."""
    before = snapshot(stream)
    for tokens in (limit + 1, limit + 2, 10**30):
        with pytest.raises(CapacityError, match=rf"rollback: {tokens} tokens from position {stream.position}, no more than {limit} can"):
            stream.rollback(tokens)
    assert snapshot(stream) == before


def test_the_decoder_says_how_far(decoder: Decoder) -> None:
    assert (decoder.shortest_capacity, decoder.slack_tokens) == (CAPACITY, SLACK)


@pytest.mark.parametrize("fed", [1, 2, 3, 5, 15, 16, 17, 18, 29, 31, 60])
def test_the_limit_is_everything_up_to_the_wrap_and_the_slack_after_it(stream: Stream, fed: int) -> None:
    stream.feed(IDS[:fed])
    limit = fed if fed <= CAPACITY else SLACK
    takes_back_at_most(stream, limit)
    stream.rollback(limit)
    assert stream.position == fed - limit


def test_the_advice_is_what_helps(stream: Stream) -> None:
    stream.feed(IDS[:40])
    stream.rollback(3)
    with pytest.raises(CapacityError, match=r"no more than 7 can be taken back: .* export with --slack 12 "):
        stream.rollback(9)
    stream.reset()
    stream.feed(IDS[:5])
    with pytest.raises(CapacityError, match=r"no more than 5 can be taken back: that is the whole stream, use reset"):
        stream.rollback(6)
    stream.reset()
    with pytest.raises(CapacityError, match=r"no more than 0 can"):
        stream.rollback(1)


def test_rollbacks_add_up_and_are_counted_from_the_furthest_token(stream: Stream, reference: Decoder) -> None:
    stream.feed(IDS[:40])
    for tokens in (1, 4, 2):
        stream.rollback(tokens)
    takes_back_at_most(stream, SLACK - 7)
    stream.feed([1, 2])  # at 33, 34: positions that were written before, so nothing more has been lost
    takes_back_at_most(stream, SLACK - 5)
    stream.rollback(SLACK - 5)
    assert stream.position == 30
    takes_back_at_most(stream, 0)
    stream.feed(range(10))
    takes_back_at_most(stream, SLACK)
    stream.feed([1])  # one further than ever
    takes_back_at_most(stream, SLACK)
    assert_close(stream._logits, logits_of(reference, [*IDS[:30], *range(10), 1]))
    stream.reset()
    stream.feed(IDS[:CAPACITY])
    takes_back_at_most(stream, CAPACITY)


def test_before_the_wrap_a_rollback_can_empty_the_stream(stream: Stream, reference: Decoder) -> None:
    stream.feed(IDS[:CAPACITY])
    stream.rollback(CAPACITY)
    assert stream.position == 0
    for call in (lambda: stream.generate(1), stream.sample):
        with pytest.raises(InputError, match="empty"):
            call()
    assert_close(stream.feed(IDS[20:50]), logits_of(reference, IDS[20:50]))


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("cut", [1, 3, 40])
def test_into_the_sinks(stream: Stream, reference: Decoder, kept: int, cut: int) -> None:
    """Other sinks than at first, and then past the wrap, where they count most."""
    stream.feed(IDS[:14])
    stream.rollback(14 - kept)
    new = IDS[20:60]
    for start in range(0, len(new), cut):
        got = stream.feed(new[start : start + cut])
    assert_close(got, logits_of(reference, [*IDS[:kept], *new]))


@pytest.mark.parametrize("fed", [9, 21, 47])
def test_pending_and_generated_tokens_are_taken_back(stream: Stream, reference: Decoder, fed: int) -> None:
    for taken, tokens in ((1, 1), (3, 1), (3, 2), (3, 3), (3, 5)):
        stream.reset()
        stream.feed(IDS[:fed])
        said = [*IDS[:fed].tolist(), *itertools.islice(stream.generate(9, stop_ids=()), taken)]
        stream.rollback(tokens)
        del said[-tokens:]
        assert (stream.position, list(stream._history)) == (len(said), said)
        # The continuation is that of the tokens left, for every way of going on.
        expected = logits_of(reference, said)
        assert next(stream.generate(1, stop_ids=())) == int(expected.argmax())
        stream.rollback(1)
        assert stream.sample() == int(expected.argmax())
        assert_close(stream._logits, expected)
        assert_close(stream.feed([3, 4], all_logits=True)[1], logits_of(reference, [*said, 3, 4]))


def test_a_pending_token_is_never_beyond_the_limit(stream: Stream) -> None:
    stream.feed(IDS[:40])
    stream.rollback(SLACK)
    next(stream.generate(1, stop_ids=()))
    takes_back_at_most(stream, 1)
    stream.rollback(1)
    takes_back_at_most(stream, 0)


def test_a_rollback_of_nothing_changes_nothing(stream: Stream) -> None:
    stream.feed(IDS[:20])
    next(stream.generate(3, temperature=1.0))
    before = snapshot(stream)
    stream.rollback(0)
    assert snapshot(stream) == before


@pytest.mark.parametrize("tokens", [-1, 1.0, True, None, "1", [1], float("nan")], ids=repr)
def test_what_is_no_number_of_tokens_is_refused(stream: Stream, tokens: Any) -> None:
    stream.feed(IDS[:20])
    before = snapshot(stream)
    with pytest.raises(InputError, match=r"^rollback: "):
        stream.rollback(tokens)
    assert snapshot(stream) == before


def test_a_closed_stream_is_refused(stream: Stream) -> None:
    stream.feed(IDS[:20])
    stream.close()
    calls: list[Callable[[], Any]] = [lambda: stream.rollback(1), stream.sample, stream.fork, lambda: stream.snapshot("never")]
    for call in calls:
        with pytest.raises(CapacityError, match="closed"):
            call()


def test_the_penalty_forgets_what_was_taken_back(stream: Stream) -> None:
    """A penalty that forbids what was said: the same call after a rollback may say it again, and what is left stays forbidden."""
    penalty = {"repetition_penalty": 1000.0, "stop_ids": ()}
    stream.feed([5, 6])
    first = list(stream.generate(20, **penalty))
    assert len({5, 6, *first}) == 22
    stream.reset()
    stream.feed([5, 6])
    said = list(itertools.islice(stream.generate(20, **penalty), 9))
    stream.rollback(6)
    assert said[:3] + list(stream.generate(17, **penalty)) == first


def test_the_random_sequence_goes_on(stream: Stream) -> None:
    """A rejected draft must not be drawn again: the tokens after a rollback are new ones."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2}
    stream.feed(IDS[:20])
    drawn = [stream.sample(**options) for _ in range(8)]
    stream.reset()
    stream.feed([*IDS[:20], 1, 2, 3])
    got = [stream.sample(**options) for _ in range(3)]
    assert len(got) == 3
    stream.rollback(3)
    assert [stream.sample(**options) for _ in range(5)] == drawn[3:]


def test_a_live_loop_goes_on_from_where_the_stream_is(stream: Stream, reference: Decoder) -> None:
    stream.feed(IDS[:20])
    loop = stream.generate(9, stop_ids=())
    first = [next(loop), next(loop), next(loop)]
    stream.rollback(2)
    assert [next(loop), next(loop)] == first[1:]
    stream.rollback(8)
    assert next(loop) == int(logits_of(reference, IDS[:15]).argmax())


def test_a_history_that_was_cut_is_still_long_enough(stream: Stream, reference: Decoder) -> None:
    """The stream remembers some thousand of its tokens; after the furthest rollback that must do for the penalty and for new logits."""
    said = np.random.default_rng(3).integers(0, V, 3000)
    stream.feed(said)
    for _ in range(150):
        stream.rollback(SLACK)
        stream.feed(said[-SLACK:])
    assert_close(stream._logits, logits_of(reference, said))
    stream.rollback(SLACK)
    assert len(stream._history) >= 1024
    with reference.stream() as fresh:
        fresh.feed(said[:-SLACK])
        options: dict[str, Any] = {"repetition_penalty": 1.5, "stop_ids": ()}
        assert list(stream.generate(30, **options)) == list(fresh.generate(30, **options))


def test_poison_in_what_was_taken_back_is_gone_once_overwritten(stream: Stream) -> None:
    """Slots of tokens that were taken back are hidden, not erased: finite rubbish in them must not count."""
    stream.feed(IDS[:40])
    stream.rollback(SLACK)
    backend, before = stream._decoder.backend, stream._decoder.backend.read_row(stream.row)
    expected = stream.feed(IDS[50:60], all_logits=True)
    stream.rollback(10)
    spoilt = {name: row.copy() for name, row in before.items()}
    for position in range(30, 40):
        for row in spoilt.values():
            row[:, :, 2 + (position - 2) % 14] = 1e6
    backend.write_row(stream.row, spoilt)
    np.testing.assert_array_equal(stream.feed(IDS[50:60], all_logits=True), expected)


@pytest.mark.parametrize("after", [False, True])
def test_a_feed_interrupted_after_a_rollback(
    decoder: Decoder, stream: Stream, reference: Decoder, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """The lost chunk may have overwritten what the last token saw: its logits can't be made anew, but the stream can be fed."""
    stream.feed(IDS[:40])
    stream.rollback(SLACK)
    prefill = decoder.backend.prefill

    def interrupted(*arguments: Any) -> Any:
        if after:
            prefill(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(decoder.backend, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.feed(IDS[40:43])
    assert stream.position == 30
    takes_back_at_most(stream, 0)
    # Three tokens at 30 to 32 had been written before: nothing more is lost.
    assert stream.sample() == int(logits_of(reference, IDS[:30]).argmax())
    stream.feed(IDS[:10])
    stream.rollback(2)
    with monkeypatch.context() as patched:
        patched.setattr(decoder.backend, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.feed(IDS[40:44])  # 38 to 41: one slot further than ever, twice
    takes_back_at_most(stream, SLACK - 4)
    stream.rollback(SLACK - 4)
    assert stream.sample() == int(logits_of(reference, [*IDS[:30], *IDS[:2]]).argmax())
    assert_close(stream.feed(IDS[:30]), logits_of(reference, [*IDS[:30], *IDS[:2], *IDS[:30]]))
