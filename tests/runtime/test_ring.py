"""The ring arithmetic against a slow, obvious cache: a list that tokens are written into one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinkring.runtime.errors import GeometryError
from sinkring.runtime.ring import RingGeometry, split_chunks

# Where a counter of 32 bits, signed or not, or a double would break.
LARGE = [2**31, 2**32, 2**53]


class ListCache:
    """The cache as a person would do it: fill it up, then overwrite the slots after the sinks in turn, from the first one again at the end.

    Begun at any position: `start` tokens are taken as fed before, of which only the newest can still lie in the ring.
    """

    def __init__(self, geometry: RingGeometry, start: int = 0) -> None:
        self.first, self.end = geometry.sinks_tokens, geometry.sinks_tokens + geometry.slots
        self.tokens: list[int | None] = [None] * self.end
        self.next = 0
        # Whole turns of the ring leave the pen where it was: skip them, then feed the rest and one more turn token by token.
        turns = max(0, (start - self.end) // geometry.slots - 1)
        for token in range(min(start, self.first)):
            self.write(token)
        for token in range(self.first + turns * geometry.slots, start):
            self.write(token)

    def write(self, token: int) -> int:
        slot = self.next
        self.tokens[slot] = token
        self.next = slot + 1 if slot + 1 < self.end else self.first
        return slot


@st.composite
def geometries(draw: st.DrawFn, largest: int = 9) -> RingGeometry:
    window = draw(st.integers(1, largest))
    return RingGeometry(draw(st.integers(0, 5)), window, window + draw(st.integers(0, 6)))


positions = st.one_of(st.integers(0, 60), st.sampled_from(LARGE).flatmap(lambda large: st.integers(large - 40, large + 40)))


@given(geometries(), positions)
def test_slot_is_where_the_list_writes(geometry: RingGeometry, start: int) -> None:
    cache = ListCache(geometry, start)
    for position in range(start, start + 3 * geometry.capacity):
        assert geometry.slot(position) == cache.write(position)


@given(geometries(), positions)
def test_token_at_is_what_the_list_holds(geometry: RingGeometry, start: int) -> None:
    cache = ListCache(geometry, start)
    for position in range(start, start + 2 * geometry.capacity):
        cache.write(position)
        assert [geometry.token_at(slot, position) for slot in range(geometry.capacity)] == cache.tokens


@given(geometries(), positions)
def test_attended_are_the_sinks_and_the_newest_window(geometry: RingGeometry, position: int) -> None:
    attended = geometry.attended(position)
    sinks = [token for token in range(geometry.sinks_tokens) if token <= position]
    window: list[int] = []
    token = position
    while token >= 0 and token not in sinks and len(window) < geometry.window_tokens:
        window.insert(0, token)
        token -= 1
    assert attended == sinks + window


@given(geometries(), positions)
def test_all_attended_tokens_lie_in_the_cache(geometry: RingGeometry, position: int) -> None:
    cache = ListCache(geometry, position + 1)
    for token in geometry.attended(position):
        assert cache.tokens[geometry.slot(token)] == token


@given(geometries(), positions)
def test_room_ends_where_the_list_turns(geometry: RingGeometry, position: int) -> None:
    cache = ListCache(geometry, position)
    slots = [cache.write(position + step) for step in range(geometry.room(position))]
    assert slots == list(range(slots[0], geometry.capacity))
    assert cache.next == geometry.sinks_tokens


@given(geometries(), positions)
def test_slack_tokens_can_be_rolled_back(geometry: RingGeometry, position: int) -> None:
    """After `slack` more tokens, all that the query at `position` attends to is still there; one more overwrites the oldest."""
    cache = ListCache(geometry, position + 1)
    for step in range(1, geometry.slack + 1):
        cache.write(position + step)
    attended = geometry.attended(position)
    assert all(cache.tokens[geometry.slot(token)] == token for token in attended)
    cache.write(position + geometry.slack + 1)
    oldest = position - geometry.window_tokens + 1
    if oldest >= geometry.sinks_tokens:
        assert cache.tokens[geometry.slot(oldest)] != oldest


def test_worked_example() -> None:
    """S=2, W=4, no slack: A(9), A(10), the slots after the query at 10, and where the next token goes."""
    geometry = RingGeometry(sinks_tokens=2, window_tokens=4, slots=4)
    assert geometry.capacity == 6
    assert geometry.attended(9) == [0, 1, 6, 7, 8, 9]
    assert geometry.attended(10) == [0, 1, 7, 8, 9, 10]
    assert [geometry.token_at(slot, 10) for slot in range(6)] == [0, 1, 10, 7, 8, 9]
    assert geometry.slot(11) == 3


def test_no_sinks_is_a_plain_sliding_window() -> None:
    geometry = RingGeometry(sinks_tokens=0, window_tokens=3, slots=3)
    assert [geometry.slot(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert geometry.attended(0) == [0]
    assert geometry.attended(5) == [3, 4, 5]


def test_stream_shorter_than_its_sinks() -> None:
    geometry = RingGeometry(sinks_tokens=4, window_tokens=2, slots=2)
    assert geometry.attended(1) == [0, 1]
    assert [geometry.token_at(slot, 1) for slot in range(6)] == [0, 1, None, None, None, None]


def test_window_of_one_sees_the_current_token_and_the_sinks() -> None:
    geometry = RingGeometry(sinks_tokens=1, window_tokens=1, slots=1)
    assert geometry.attended(7) == [0, 7]
    assert geometry.slot(7) == geometry.slot(8) == 1


@st.composite
def feeds(draw: st.DrawFn) -> tuple[int, int, int, tuple[RingGeometry, ...]]:
    rings = tuple(draw(st.lists(geometries(largest=20), min_size=1, max_size=3)))
    chunk = draw(st.integers(1, 1 + min(ring.slack for ring in rings)))
    return draw(positions), draw(st.integers(0, 70)), chunk, rings


@given(feeds())
def test_chunks_sum_up_and_fit(feed: tuple[int, int, int, tuple[RingGeometry, ...]]) -> None:
    start, tokens, chunk, rings = feed
    lengths = list(split_chunks(start, tokens, chunk, rings))
    assert sum(lengths) == tokens
    assert all(1 <= length <= chunk for length in lengths)


@given(feeds())
def test_chunks_never_cross_the_end_of_a_ring(feed: tuple[int, int, int, tuple[RingGeometry, ...]]) -> None:
    position, tokens, chunk, rings = feed
    caches = [ListCache(ring, position) for ring in rings]
    for length in split_chunks(position, tokens, chunk, rings):
        for cache in caches:
            slots = [cache.write(position + step) for step in range(length)]
            assert slots == list(range(slots[0], slots[0] + length))
        position += length


@given(feeds())
def test_chunks_overwrite_nothing_that_their_own_queries_need(feed: tuple[int, int, int, tuple[RingGeometry, ...]]) -> None:
    """A chunk is written as a whole before its first query attends."""
    position, tokens, chunk, rings = feed
    caches = [ListCache(ring, position) for ring in rings]
    for length in split_chunks(position, tokens, chunk, rings):
        for ring, cache in zip(rings, caches, strict=True):
            for step in range(length):
                cache.write(position + step)
            for query in range(position, position + length):
                missing = [token for token in ring.attended(query) if token not in cache.tokens]
                assert missing == []
        position += length


@given(feeds())
def test_chunks_are_no_shorter_than_they_must_be(feed: tuple[int, int, int, tuple[RingGeometry, ...]]) -> None:
    position, tokens, chunk, rings = feed
    left = tokens
    for length in split_chunks(position, tokens, chunk, rings):
        assert length in (chunk, left, *(ring.room(position) for ring in rings))
        position, left = position + length, left - length


@settings(max_examples=50)
@given(st.integers(0, 5), st.integers(1, 30), st.integers(1, 30), st.integers(0, 30))
def test_for_chunk_is_the_smallest_ring_that_serves(sinks: int, window: int, chunk: int, slack: int) -> None:
    geometry = RingGeometry.for_chunk(sinks, window, chunk, slack)
    assert (geometry.sinks_tokens, geometry.window_tokens) == (sinks, window)
    assert geometry.slack >= slack
    assert sum(split_chunks(0, 90, chunk, (geometry,))) == 90
    assert geometry.slack == slack or geometry.slack == chunk - 1


@pytest.mark.parametrize(
    ("sinks", "window", "slots", "says"),
    [(-1, 4, 4, "sinks=-1"), (0, 0, 4, "window=0"), (2, 5, 4, "ring slots=4 is less than window=5")],
)
def test_impossible_geometry_is_refused(sinks: int, window: int, slots: int, says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        RingGeometry(sinks, window, slots)


def test_impossible_chunk_and_slack_are_refused() -> None:
    with pytest.raises(GeometryError, match="chunk=0"):
        RingGeometry.for_chunk(0, 4, chunk=0)
    with pytest.raises(GeometryError, match="slack=-1"):
        RingGeometry.for_chunk(0, 4, chunk=1, slack=-1)


def test_chunk_longer_than_the_slack_allows_is_refused() -> None:
    small, large = RingGeometry(2, 4, 6), RingGeometry(2, 4, 40)
    assert list(split_chunks(8, 6, 3, (small, large))) == [3, 3]
    with pytest.raises(GeometryError, match=r"chunk=4 needs a slack of 3 tokens.*M=6.*has 2: use a chunk of at most 3"):
        list(split_chunks(8, 6, 4, (large, small)))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.data())
def test_a_linear_cache_sees_all_and_keeps_all(capacity: int, multiple: int, chunk: int, data: st.DataObject) -> None:
    geometry = RingGeometry.linear(capacity, multiple)
    assert (geometry.most_tokens, geometry.capacity % multiple) == (capacity, 0)
    assert capacity <= geometry.capacity < capacity + multiple
    start = data.draw(st.integers(0, capacity - 1))
    for position in range(capacity):
        assert geometry.slot(position) == position
        assert geometry.attended(position) == list(range(position + 1))
    # No slack is needed, and nothing but the end cuts a chunk short.
    lengths = list(split_chunks(start, capacity - start, chunk, (geometry,)))
    assert lengths == [chunk] * ((capacity - start) // chunk) + [rest for rest in [(capacity - start) % chunk] if rest]


def test_linear_caches_that_make_no_sense_are_refused() -> None:
    with pytest.raises(GeometryError, match="capacity=0: must be 1 or more"):
        RingGeometry.linear(0)
    with pytest.raises(GeometryError, match="sinks=1 in a cache that does not wrap"):
        RingGeometry(1, 4, 4, wraps=False)
