"""Decoder.step: exactly the named streams advance, and what they compute does not depend on the others. Ring: S = 2, W = 4, C = 16."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError, InputError, NumericalError

from tests.runtime.stream_case import V, assert_close, snapshot

IDS = np.random.default_rng(8).integers(0, V, (3, 80))
# Before, at and past the wrap, each at another slot.
LENGTHS = (5, 20, 33)
POISON = (np.nan, np.inf, 1e30)


@pytest.fixture
def decoder(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


@pytest.fixture
def streams(decoder: Decoder) -> list[Stream]:
    """Three streams, fed to LENGTHS."""
    taken = [decoder.stream() for _ in LENGTHS]
    for stream, ids, length in zip(taken, IDS, LENGTHS, strict=True):
        stream.feed(ids[:length])
    return taken


@pytest.fixture
def reference(tiny_bundle: Path) -> Iterator[Decoder]:
    """One row, fed in whole calls: other graphs than `step` runs."""
    with open_bundle(tiny_bundle, threads=1) as opened:
        yield opened


def fill(stream: Stream, value: float) -> None:
    backend = stream._decoder.backend
    backend.write_row(stream.row, {name: np.full_like(row, value) for name, row in backend.read_row(stream.row).items()})


@pytest.mark.parametrize("named", [rows for count in (1, 2, 3) for rows in itertools.combinations(range(3), count)], ids=str)
def test_exactly_the_named_streams_advance(decoder: Decoder, streams: list[Stream], reference: Decoder, named: tuple[int, ...]) -> None:
    said = [IDS[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    # Past the wrap from every start, so that the idle rows' next slot is also one that still counts.
    for round_ in range(20):
        before = [snapshot(stream) for stream in streams]
        tokens = {streams[row]: int(IDS[row, 50 + round_]) for row in named}
        got = decoder.step(tokens)
        assert list(got) == list(tokens)
        for row, stream in enumerate(streams):
            if row in named:
                said[row].append(tokens[stream])
                assert stream.position == len(said[row])
                np.testing.assert_array_equal(got[stream], stream._logits)
            else:
                assert snapshot(stream) == before[row], f"round {round_}: row {row} was not named"
    for row, stream in enumerate(streams):
        with reference.stream() as fresh:
            fresh.feed(said[row])
            assert_close(stream.feed([1]), fresh.feed([1]))
            if row in named:
                assert list(stream._history)[:-1] == said[row]


def test_what_step_returned_is_never_overwritten(decoder: Decoder, streams: list[Stream]) -> None:
    got = decoder.step({streams[0]: 1, streams[1]: 2})
    kept = {stream: logits.copy() for stream, logits in got.items()}
    decoder.step(dict.fromkeys(streams, 3))
    streams[0].reset()
    for stream, logits in got.items():
        np.testing.assert_array_equal(logits, kept[stream])


def test_a_row_steps_in_company_as_it_does_alone(decoder: Decoder, tiny_bundle_of_three: Path) -> None:
    """Bit for bit, for it is the same graph on the same row; other rows join, pause, reset and leave meanwhile."""
    streams = [decoder.stream() for _ in range(3)]
    together = []
    for step in range(60):
        if step % 17 == 5:
            streams[0].reset()
        if step % 23 == 11:
            streams[2].close()
            streams[2] = decoder.stream()
        others = {streams[row]: int(IDS[row, step]) for row in (0, 2) if (step + row) % 3}
        together.append(decoder.step({**others, streams[1]: int(IDS[1, step])})[streams[1]])
    with open_bundle(tiny_bundle_of_three, threads=1) as other:
        alone = [other.stream(), other.stream()][1]
        for step, expected in enumerate(together):
            np.testing.assert_array_equal(other.step({alone: int(IDS[1, step])})[alone], expected, err_msg=f"step {step}")


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("sick", ["stepping", "idle", "free"])
def test_poison_in_a_row_stays_there(decoder: Decoder, tiny_bundle_of_three: Path, poison: float, sick: str) -> None:
    streams = [decoder.stream() for _ in range(3)]
    with open_bundle(tiny_bundle_of_three, threads=1) as other:
        healthy = [other.stream() for _ in range(3)]
        for one in (streams, healthy):
            for stream, ids in zip(one, IDS, strict=True):
                stream.feed(ids[:20])
        fill(streams[1], poison)
        if sick == "free":
            streams[1].close()
        before = None if sick == "free" else snapshot(streams[1])
        for token in range(30):
            company = {streams[1]: token} if sick == "stepping" and streams[1].alarm is None else {}
            got = decoder.step({streams[0]: token, streams[2]: token + 1, **company})
            expected = other.step({healthy[0]: token, healthy[2]: token + 1})
            for row in (0, 2):
                np.testing.assert_array_equal(got[streams[row]], expected[healthy[row]])
                assert np.isfinite(got[streams[row]]).all()
            if company and np.isnan(poison):
                assert np.isnan(got[streams[1]]).all()
                assert streams[1].alarm is not None
                with pytest.raises(NumericalError):
                    decoder.step({streams[0]: token, streams[1]: token})
        if sick == "idle":
            assert snapshot(streams[1]) == before
        if sick != "free":
            streams[1].close()
        # The row is fresh for whoever takes it next.
        expected_fresh = healthy[1]
        expected_fresh.reset()
        np.testing.assert_array_equal(decoder.stream().feed(IDS[1]), expected_fresh.feed(IDS[1]))


def test_a_free_row_that_was_stepped_over_is_fresh_when_taken(decoder: Decoder, streams: list[Stream]) -> None:
    expected = {name: row.tobytes() for name, row in decoder.backend.read_row(0).items()}
    streams[2].close()
    for token in range(5):
        decoder.step({streams[0]: token})
    taken = decoder.stream()
    assert taken.row == streams[2].row
    assert all((row == 0).all() for row in decoder.backend.read_row(taken.row).values())
    assert any(row.any() for row in decoder.backend.read_row(0).values()), expected.keys()


def test_pending_tokens_are_written_first(decoder: Decoder, streams: list[Stream], reference: Decoder) -> None:
    said = [IDS[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    for round_ in range(12):
        for row in (0, 1):
            said[row] += itertools.islice(streams[row].generate(9, stop_ids=()), 1 + round_ % 3)
        waiting = snapshot(streams[1])
        assert waiting["pending"]
        got = decoder.step({streams[0]: 7, streams[2]: 8})
        said[0].append(7)
        said[2].append(8)
        assert snapshot(streams[1]) == waiting, "the pending token of a stream that is not named stays pending"
        for row in (0, 2):
            with reference.stream() as fresh:
                assert_close(got[streams[row]], fresh.feed(said[row]))
    with reference.stream() as fresh:
        assert_close(decoder.step({streams[1]: 9})[streams[1]], fresh.feed([*said[1], 9]))


def test_one_row_steps_as_it_feeds(reference: Decoder, tiny_bundle: Path) -> None:
    with open_bundle(tiny_bundle, threads=1) as other:
        stepped, fed = reference.stream(), other.stream()
        for token in IDS[0].tolist():
            np.testing.assert_array_equal(reference.step({stepped: token})[stepped], fed.feed([token]))
        assert snapshot(stepped) == snapshot(fed)


@pytest.mark.parametrize("token", [5, np.int64(5), np.uint8(5)], ids=lambda token: type(token).__name__)
def test_every_kind_of_whole_number_is_a_token(decoder: Decoder, streams: list[Stream], token: Any) -> None:
    decoder.step({streams[0]: token})
    assert streams[0]._history[-1] == 5
    assert type(streams[0]._history[-1]) is int


BAD_TOKENS = [V, -1, 2**63, 2**100, 1.0, True, None, "1", [1], [], np.array([1, 2]), float("nan")]


@pytest.mark.parametrize("token", BAD_TOKENS, ids=repr)
def test_bad_tokens_are_refused_and_change_nothing(decoder: Decoder, streams: list[Stream], token: Any) -> None:
    next(streams[0].generate(1))
    before = [snapshot(stream) for stream in streams]
    for order in ((0, 1), (1, 0)):
        tokens = {streams[row]: token if row else 3 for row in order}
        with pytest.raises(InputError, match=r"^step: ") as raised:
            decoder.step(tokens)
        assert "\n" not in str(raised.value)
    assert [snapshot(stream) for stream in streams] == before


def test_what_is_no_dictionary_of_streams_is_refused(decoder: Decoder, streams: list[Stream], tiny_bundle_of_three: Path) -> None:
    closed = streams.pop()
    closed.close()
    before = [snapshot(stream) for stream in streams]
    with open_bundle(tiny_bundle_of_three, threads=1) as other:
        foreign: Any = other.stream()
        wrong: list[Any] = [{}, None, [(streams[0], 1)], {0: 1}, {None: 1}, {closed: 1}, {foreign: 1}, {streams[0]: 1, closed: 2}]
        wrong += [{streams[0]: 1, foreign: 2}, {foreign: 2, streams[0]: 1}, {"row": 1}]
        for tokens in wrong:
            with pytest.raises(InputError, match=r"^step: "):
                decoder.step(tokens)
        assert [snapshot(stream) for stream in streams] == before
        # The row of the closed stream has a new owner: the old one is still refused.
        decoder.stream()
        with pytest.raises(InputError, match="closed or belongs to another decoder"):
            decoder.step({closed: 1})
    decoder.close()
    with pytest.raises(CapacityError, match="closed"):
        decoder.step({streams[0]: 1})


def test_the_position_limit_of_one_stops_all_before_anything_is_written(decoder: Decoder, streams: list[Stream]) -> None:
    limit = decoder.manifest.position_limit
    streams[1]._fed = limit
    before = [snapshot(stream) for stream in streams]
    with pytest.raises(CapacityError, match=str(limit)):
        decoder.step({streams[0]: 1, streams[1]: 1})
    assert [snapshot(stream) for stream in streams] == before


def test_a_stream_at_the_position_limit_does_not_hold_up_the_others(decoder: Decoder, streams: list[Stream]) -> None:
    streams[1]._fed = decoder.manifest.position_limit
    before = snapshot(streams[1])
    assert np.isfinite(decoder.step({streams[0]: 1})[streams[0]]).all()
    assert snapshot(streams[1]) == before


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 4},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sample_and_step_is_generate(reference: Decoder, options: dict[str, Any]) -> None:
    with reference.stream() as stream:
        stream.feed(IDS[0, :9])
        expected = list(stream.generate(40, stop_ids=(), **options))
    with reference.stream() as stream:
        stream.feed(IDS[0, :9])
        got = []
        for turn in range(40):
            token = stream.sample(**options)
            assert stream.position == 9 + turn, "a sampled token is not yet part of the stream"
            reference.step({stream: token}) if turn % 2 else stream.feed([token])
            got.append(token)
    assert got == expected


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_text_does_not_depend_on_its_neighbours(decoder: Decoder, tiny_bundle_of_three: Path, options: dict[str, Any]) -> None:
    with open_bundle(tiny_bundle_of_three, threads=1) as other:
        alone = [other.stream(), other.stream()][1]
        alone.feed(IDS[1, :9])
        expected = []
        for _ in range(50):
            expected.append(alone.sample(**options))
            other.step({alone: expected[-1]})
    streams = [decoder.stream() for _ in range(3)]
    for stream, ids in zip(streams, IDS, strict=True):
        stream.feed(ids[:9])
    got = []
    for turn in range(50):
        tokens = {streams[1]: streams[1].sample(**options)}
        got.append(tokens[streams[1]])
        if turn % 4:
            tokens[streams[0]] = streams[0].sample(**options)
        if turn % 5 == 0:
            next(streams[2].generate(1, temperature=1.5, seed=turn, stop_ids=()))
        decoder.step(tokens)
    assert got == expected


def test_equal_seeds_give_equal_texts_on_all_rows(decoder: Decoder) -> None:
    streams = [decoder.stream() for _ in range(3)]
    texts: list[list[int]] = [[], [], []]
    decoder.step(dict.fromkeys(streams, 5))
    for _ in range(40):
        tokens = {stream: stream.sample(**OPTIONS["filtered"]) for stream in streams}
        for text, stream in zip(texts, streams, strict=True):
            text.append(tokens[stream])
        decoder.step(tokens)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_step_leaves_streams_that_can_go_on(
    decoder: Decoder, streams: list[Stream], reference: Decoder, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    decode = decoder.backend.decode

    def interrupted(idle: Any) -> None:
        if after:
            decode(idle)
        raise KeyboardInterrupt

    before = snapshot(streams[2])
    with monkeypatch.context() as patched:
        patched.setattr(decoder.backend, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.step({streams[0]: 1, streams[1]: 2})
    assert snapshot(streams[2]) == before
    assert [stream.position for stream in streams] == list(LENGTHS)
    # The slot that the lost token was written to held one that the furthest rollback would have needed.
    for stream in streams[:2]:
        limit = min(stream.position, decoder.slack_tokens - 1) if stream.position >= decoder.shortest_capacity else stream.position
        with pytest.raises(CapacityError, match=f"no more than {limit} "):
            stream.rollback(limit + 1)
    streams[1].rollback(decoder.slack_tokens - 1)
    kept = IDS[1, : streams[1].position].tolist()
    with reference.stream() as fresh:
        fresh.feed(kept)
        assert streams[1].sample() == int(fresh._logits.argmax())
    got = decoder.step({streams[0]: 3, streams[1]: 4})
    for row, said in ((0, [*IDS[0, :5].tolist(), 3]), (1, [*kept, 4])):
        with reference.stream() as fresh:
            assert_close(got[streams[row]], fresh.feed(said))
