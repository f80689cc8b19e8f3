"""Streams under random orders of calls, against a model that knows nothing but each stream's ids and how far it was written."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule, run_state_machine_as_test
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError, InputError

V, ROWS = 97, 3
CAPACITY, SLACK = 16, 10
TOKEN = st.integers(0, V - 1)
TOLERANCE = 1e-4


class Streams(RuleBasedStateMachine):
    """Each live stream beside the ids that it was fed and that it yielded, and how far it was ever written."""

    decoder: ClassVar[Decoder]
    reference: ClassVar[Decoder]
    folder: ClassVar[Path]
    streams = Bundle("streams")
    files = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[Stream, list[int]] = {}
        self.written: dict[Stream, int] = {}
        self.saved: dict[Path, tuple[list[int], int]] = {}

    @rule(target=streams)
    def take(self) -> object:
        if len(self.ids) == ROWS:
            with pytest.raises(CapacityError):
                self.decoder.stream()
            return multiple()
        return self._follow(self.decoder.stream(), [], 0)

    @rule(target=streams, stream=streams)
    def fork(self, stream: Stream) -> object:
        if len(self.ids) == ROWS:
            with pytest.raises(CapacityError):
                stream.fork()
            return multiple()
        return self._follow(stream.fork(), self.ids[stream], self.written[stream])

    @rule(target=files, stream=streams)
    def snapshot(self, stream: Stream) -> Path:
        path = self.folder / f"{len(self.saved)}"
        stream.snapshot(path)
        self.saved[path] = list(self.ids[stream]), self.written[stream]
        return path

    @rule(target=streams, path=files)
    def restore(self, path: Path) -> object:
        if len(self.ids) == ROWS:
            with pytest.raises(CapacityError):
                self.decoder.restore(path)
            return multiple()
        return self._follow(self.decoder.restore(path), *self.saved[path])

    @rule(tokens=st.dictionaries(streams, TOKEN, min_size=1, max_size=ROWS), cut=st.integers(1, 9))
    def step(self, tokens: dict[Stream, int], cut: int) -> None:
        got = self.decoder.step(tokens)
        assert got.keys() == tokens.keys()
        for stream, token in tokens.items():
            self._extend(stream, [token])
            self._compare(stream, got[stream][None], cut)

    @rule(stream=streams, tokens=st.integers(0, 25))
    def rollback(self, stream: Stream, tokens: int) -> None:
        ids, written = self.ids[stream], self.written[stream]
        limit = max(len(ids) - (written - SLACK if written > CAPACITY else 0), 0)
        if tokens > limit:
            with pytest.raises(CapacityError, match=f"no more than {limit} "):
                stream.rollback(tokens)
            return
        stream.rollback(tokens)
        self.ids[stream] = ids[: len(ids) - tokens]

    @rule(stream=streams, temperature=st.sampled_from([0.0, 1.0]), cut=st.integers(1, 9))
    def sample(self, stream: Stream, temperature: float, cut: int) -> None:
        if not self.ids[stream]:
            with pytest.raises(InputError):
                stream.sample()
            return
        assert 0 <= stream.sample(temperature=temperature) < V
        self._extend(stream, [])
        self._compare(stream, stream._logits[None], cut)

    @rule(stream=streams, ids=st.lists(TOKEN, min_size=1, max_size=25), cut=st.integers(1, 9))
    def feed(self, stream: Stream, ids: list[int], cut: int) -> None:
        self._extend(stream, ids)
        self._compare(stream, stream.feed(ids)[None], cut)

    @rule(stream=streams, ids=st.lists(TOKEN, min_size=1, max_size=25), cut=st.integers(1, 9))
    def feed_all(self, stream: Stream, ids: list[int], cut: int) -> None:
        self._extend(stream, ids)
        self._compare(stream, stream.feed(ids, all_logits=True), cut)

    @rule(stream=streams, count=st.integers(0, 20), taken=st.integers(0, 20), temperature=st.sampled_from([0.0, 1.0]))
    def generate(self, stream: Stream, count: int, taken: int, temperature: float) -> None:
        if not self.ids[stream]:
            with pytest.raises(InputError):
                stream.generate(count)
            return
        loop = stream.generate(count, temperature=temperature, stop_ids=())
        for _, token in zip(range(taken), loop, strict=False):
            self._extend(stream, [])  # The token before it has been written, this one has not.
            self.ids[stream].append(token)

    @rule(stream=streams, ids=st.lists(st.integers(-5, V + 5), max_size=5).filter(lambda ids: not ids or not all(0 <= i < V for i in ids)))
    def feed_what_is_refused(self, stream: Stream, ids: list[int]) -> None:
        with pytest.raises(InputError):
            stream.feed(ids)

    @rule(stream=streams)
    def reset(self, stream: Stream) -> None:
        stream.reset()
        self.ids[stream], self.written[stream] = [], 0

    @rule(stream=streams)
    def poison_and_reset(self, stream: Stream) -> None:
        backend = self.decoder.backend
        backend.write_row(stream.row, {name: np.full_like(row, np.nan) for name, row in backend.read_row(stream.row).items()})
        self.reset(stream)

    @rule(stream=consumes(streams))
    def close(self, stream: Stream) -> None:
        stream.close()
        del self.ids[stream]
        with pytest.raises(CapacityError):
            stream.feed([1])

    @invariant()
    def positions_and_rows(self) -> None:
        assert {stream: stream.position for stream in self.ids} == {stream: len(ids) for stream, ids in self.ids.items()}
        assert len({stream.row for stream in self.ids}) == len(self.ids)

    def teardown(self) -> None:
        for stream in self.ids:
            self._extend(stream, [1])
            self._compare(stream, stream.feed([1])[None], 7)
            stream.close()

    def _follow(self, stream: Stream, ids: list[int], written: int) -> Stream:
        self.ids[stream], self.written[stream] = list(ids), written
        return stream

    def _extend(self, stream: Stream, ids: list[int]) -> None:
        """The stream's tokens, these included, are all in the cache now."""
        self.ids[stream] = [*self.ids[stream], *ids]
        self.written[stream] = max(self.written[stream], len(self.ids[stream]))

    def _compare(self, stream: Stream, got: np.ndarray, cut: int) -> None:
        """With a fresh stream of another decoder that is fed the same ids in other cuts."""
        ids = self.ids[stream]
        with self.reference.stream() as fresh:
            parts = [fresh.feed(ids[start : start + cut], all_logits=True) for start in range(0, len(ids), cut)]
        error = np.abs(got - np.concatenate(parts)[-len(got) :]).max()
        assert error <= TOLERANCE, f"max error {error:.2e} after {len(ids)} ids"


def test_streams_equal_their_ids_fed_afresh(tiny_bundle: Path, tiny_bundle_of_three: Path, tmp_path: Path) -> None:
    with open_bundle(tiny_bundle_of_three, threads=1) as decoder, open_bundle(tiny_bundle, threads=1) as reference:
        Streams.decoder, Streams.reference, Streams.folder = decoder, reference, tmp_path
        assert (decoder.shortest_capacity, decoder.slack_tokens) == (CAPACITY, SLACK)
        run_state_machine_as_test(
            Streams,
            settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
        )
