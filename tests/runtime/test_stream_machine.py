"""Streams under random orders of calls, against a model that remembers nothing but each stream's ids."""

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
TOKEN = st.integers(0, V - 1)
TOLERANCE = 1e-4


class Streams(RuleBasedStateMachine):
    """Each live stream beside the ids that it was fed and that it yielded."""

    decoder: ClassVar[Decoder]
    reference: ClassVar[Decoder]
    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[Stream, list[int]] = {}

    @rule(target=streams)
    def take(self) -> object:
        if len(self.ids) == ROWS:
            with pytest.raises(CapacityError):
                self.decoder.stream()
            return multiple()
        stream = self.decoder.stream()
        self.ids[stream] = []
        return stream

    @rule(stream=streams, ids=st.lists(TOKEN, min_size=1, max_size=25), cut=st.integers(1, 9))
    def feed(self, stream: Stream, ids: list[int], cut: int) -> None:
        self.ids[stream] += ids
        self._compare(stream, stream.feed(ids)[None], cut)

    @rule(stream=streams, ids=st.lists(TOKEN, min_size=1, max_size=25), cut=st.integers(1, 9))
    def feed_all(self, stream: Stream, ids: list[int], cut: int) -> None:
        self.ids[stream] += ids
        self._compare(stream, stream.feed(ids, all_logits=True), cut)

    @rule(stream=streams, count=st.integers(0, 20), taken=st.integers(0, 20), temperature=st.sampled_from([0.0, 1.0]))
    def generate(self, stream: Stream, count: int, taken: int, temperature: float) -> None:
        if not self.ids[stream]:
            with pytest.raises(InputError):
                stream.generate(count)
            return
        loop = stream.generate(count, temperature=temperature, stop_ids=())
        for _, token in zip(range(taken), loop, strict=False):
            self.ids[stream].append(token)

    @rule(stream=streams, ids=st.lists(st.integers(-5, V + 5), max_size=5).filter(lambda ids: not ids or not all(0 <= i < V for i in ids)))
    def feed_what_is_refused(self, stream: Stream, ids: list[int]) -> None:
        with pytest.raises(InputError):
            stream.feed(ids)

    @rule(stream=streams)
    def reset(self, stream: Stream) -> None:
        stream.reset()
        self.ids[stream] = []

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
        for stream, ids in self.ids.items():
            ids.append(1)
            self._compare(stream, stream.feed([1])[None], 7)
            stream.close()

    def _compare(self, stream: Stream, got: np.ndarray, cut: int) -> None:
        """With a fresh stream of another decoder that is fed the same ids in other cuts."""
        ids = self.ids[stream]
        with self.reference.stream() as fresh:
            parts = [fresh.feed(ids[start : start + cut], all_logits=True) for start in range(0, len(ids), cut)]
        error = np.abs(got - np.concatenate(parts)[-len(got) :]).max()
        assert error <= TOLERANCE, f"max error {error:.2e} after {len(ids)} ids"


def test_streams_equal_their_ids_fed_afresh(tiny_bundle: Path, tiny_bundle_of_three: Path) -> None:
    with open_bundle(tiny_bundle_of_three, threads=1) as decoder, open_bundle(tiny_bundle, threads=1) as reference:
        Streams.decoder, Streams.reference = decoder, reference
        run_state_machine_as_test(
            Streams,
            settings=settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)),
        )
