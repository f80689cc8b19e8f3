"""A linear cache is full after the tokens it was exported for: refused before anything is written, and nothing is forgotten until then."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError

from tests.exporter.tiny_bundle import shared_tiny
from tests.runtime.stream_case import IDS, assert_close, snapshot, tokens_until

CAPACITY, CHUNK = 21, 8  # C = 24: a multiple of 8, of which the last three are never used
FULL = rf"is {CAPACITY + 1}, the bundle's capacity is {CAPACITY}: .* larger --capacity, or with --policy streaming"


@pytest.fixture(scope="module", params=[1, 2], ids=["one row", "two rows"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {"batch": 2} if request.param == 2 else {}
    return shared_tiny(tmp_path_factory, policy="native", capacity=CAPACITY, chunk=CHUNK, **rows)


@pytest.fixture
def decoder(bundle: Path) -> Iterator[Decoder]:
    with open_bundle(bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def stream(decoder: Decoder) -> Stream:
    return decoder.stream()


def test_the_manifest_says_what_holds(decoder: Decoder) -> None:
    (ring,) = decoder.manifest.rings
    assert (ring.geometry.most_tokens, ring.geometry.capacity) == (CAPACITY, 24)
    assert {(state.kind, state.shape[2]) for state in decoder.manifest.states} == {("linear", 24)}
    assert decoder.cache_bytes == decoder.manifest.cache_bytes_formula == decoder.manifest.batch * 24 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("before", [0, 1, CAPACITY - CHUNK, CAPACITY - 1])
def test_feed_takes_the_capacity_and_not_one_more(stream: Stream, before: int) -> None:
    if before:
        stream.feed(IDS[:before])
    was = snapshot(stream)
    for all_logits in (False, True):
        with pytest.raises(CapacityError, match=FULL):
            stream.feed(IDS[before : CAPACITY + 1], all_logits=all_logits)
    assert snapshot(stream) == was
    if before < CAPACITY - 1:
        stream.feed(IDS[before : CAPACITY - 1])
    stream.feed(IDS[CAPACITY - 1 : CAPACITY])
    assert stream.position == CAPACITY
    was = snapshot(stream)
    with pytest.raises(CapacityError, match=FULL):
        stream.feed([1])
    assert snapshot(stream) == was


def test_step_takes_the_capacity_and_not_one_more(decoder: Decoder, stream: Stream) -> None:
    expected = stream.feed(IDS[:CAPACITY], all_logits=True)
    stream.reset()
    for position in range(CAPACITY):
        assert_close(decoder.step({stream: int(IDS[position])})[stream], expected[position])
    was = snapshot(stream)
    with pytest.raises(CapacityError, match=FULL):
        decoder.step({stream: 1})
    assert snapshot(stream) == was


@pytest.mark.parametrize("fed", [CAPACITY - 3, CAPACITY - 1, CAPACITY])
def test_generate_yields_what_fits_and_loses_nothing(stream: Stream, fed: int) -> None:
    stream.feed(IDS[:fed])
    loop = stream.generate(9, temperature=1.0, seed=3, stop_ids=())
    tokens = tokens_until(CapacityError, loop)
    assert (fed + len(tokens), stream.position) == (CAPACITY, CAPACITY)
    assert list(stream._history)[fed:] == tokens
    was = snapshot(stream)
    with pytest.raises(CapacityError, match=FULL):
        next(stream.generate(1, temperature=1.0, seed=3, stop_ids=()))
    assert snapshot(stream) == was, "the sampler has not moved either"
    # All that was generated is written, the last token at the last place that the capacity allows.
    whole = np.array([*IDS[:fed], *tokens])
    stream.flush()
    last = stream._logits.copy()
    stream.reset()
    assert_close(stream.feed(whole), last)


def test_a_full_stream_still_has_its_next_token(stream: Stream) -> None:
    logits = stream.feed(IDS[:CAPACITY])
    assert stream.sample() == int(logits.argmax())
    assert stream.position == CAPACITY


def test_any_number_can_be_rolled_back(stream: Stream) -> None:
    whole = stream.feed(IDS[:CAPACITY], all_logits=True)
    for back in (1, CHUNK, CAPACITY - 1, CAPACITY):
        stream.rollback(back)
        assert stream.position == CAPACITY - back
        assert_close(stream.feed(IDS[CAPACITY - back : CAPACITY], all_logits=True), whole[CAPACITY - back :])
    # Other tokens than before, so that what was there must be gone.
    stream.rollback(CAPACITY - 4)
    other = stream.feed(IDS[30 : 30 + CAPACITY - 4])
    stream.reset()
    assert_close(stream.feed([*IDS[:4], *IDS[30 : 30 + CAPACITY - 4]]), other)
    stream.rollback(5)
    with pytest.raises(CapacityError):
        stream.rollback(CAPACITY - 4)


def test_reset_makes_room(stream: Stream) -> None:
    first = stream.feed(IDS[:CAPACITY], all_logits=True)
    stream.reset()
    np.testing.assert_array_equal(stream.feed(IDS[:CAPACITY], all_logits=True), first)


def test_a_snapshot_keeps_the_limit(decoder: Decoder, stream: Stream, tmp_path: Path) -> None:
    stream.feed(IDS[: CAPACITY - 2])
    stream.snapshot(tmp_path / "kept")
    last = stream.feed(IDS[CAPACITY - 2 : CAPACITY])
    stream.close()
    with decoder.restore(tmp_path / "kept") as restored:
        assert restored.position == CAPACITY - 2
        with pytest.raises(CapacityError, match=FULL):
            restored.feed(IDS[:3])
        np.testing.assert_array_equal(restored.feed(IDS[CAPACITY - 2 : CAPACITY]), last)
        restored.rollback(CAPACITY - 1)
        assert restored.position == 1


@pytest.mark.parametrize("bundle", [2], ids=["two rows"], indirect=True)
def test_a_full_neighbour_is_left_alone(decoder: Decoder, stream: Stream) -> None:
    """The decode graph steps every row: also one that has no slot left for the token that it is not given."""
    stream.feed(IDS[:CAPACITY])
    full, other = snapshot(stream), stream.fork()
    other.rollback(CAPACITY - 2)
    alone = other.feed(IDS[40:46], all_logits=True)
    other.rollback(6)
    for position in range(6):
        assert_close(decoder.step({other: int(IDS[40 + position])})[other], alone[position])
    assert snapshot(stream) == full
