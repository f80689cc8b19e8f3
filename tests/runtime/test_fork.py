"""A fork goes on bit for bit, and neither side sees the other afterwards. Ring: S = 2, W = 4, C = 16."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError

from tests.runtime.stream_case import IDS, snapshot

PENALISED: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.4, "seed": 9, "stop_ids": ()}


@pytest.fixture
def decoder(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


def in_the_middle(stream: Stream) -> None:
    """Past the wrap, with a sampler, something taken back and a pending token."""
    stream.feed(IDS[:30])
    list(itertools.islice(stream.generate(9, **PENALISED), 5))
    stream.rollback(3)
    list(itertools.islice(stream.generate(9, **PENALISED), 1))
    assert stream._pending


def go_on(stream: Stream) -> tuple[bytes, list[int], dict[str, Any]]:
    logits = stream.feed(IDS[30:41], all_logits=True).tobytes()
    return logits, list(stream.generate(25, **PENALISED)), snapshot(stream)


def test_a_fork_goes_on_bit_for_bit(decoder: Decoder) -> None:
    stream = decoder.stream()
    in_the_middle(stream)
    twin = stream.fork()
    assert twin.row != stream.row
    assert snapshot(twin) == snapshot(stream)
    assert go_on(twin) == go_on(stream)
    assert twin.fork().position == twin.position


@pytest.mark.parametrize("first", ["original", "fork"])
def test_neither_side_sees_the_other(decoder: Decoder, first: str) -> None:
    stream = decoder.stream()
    in_the_middle(stream)
    twin, third = stream.fork(), stream.fork()
    expected = go_on(third)
    third.close()
    one, other = (stream, twin) if first == "original" else (twin, stream)
    before = snapshot(other)
    one.feed(IDS[:5])
    one.rollback(4)
    list(one.generate(7, **PENALISED))
    list(one.generate(7, temperature=0.3))
    decoder.step({one: 4})
    one.reset()
    one.feed(IDS[:30])
    assert snapshot(other) == before
    one.close()
    assert snapshot(other) == before
    decoder.stream().feed(IDS)  # on the row that was given back
    assert go_on(other) == expected


def test_a_fork_before_anything_was_fed(decoder: Decoder) -> None:
    stream = decoder.stream()
    twin = stream.fork()
    assert (twin.position, snapshot(twin)) == (0, snapshot(stream))
    assert go_on(twin) == go_on(stream)


def test_a_loop_stays_with_its_stream(decoder: Decoder) -> None:
    stream = decoder.stream()
    stream.feed(IDS[:20])
    expected = list(stream.fork().generate(9, **PENALISED))
    loop = stream.generate(9, **PENALISED)
    got = [next(loop), next(loop), next(loop)]
    twin = stream.fork()
    assert [*got, *loop] == expected
    assert list(twin.generate(6, **PENALISED)) == expected[3:]


def test_no_free_row(decoder: Decoder) -> None:
    streams = [decoder.stream() for _ in range(3)]
    for stream in streams:
        in_the_middle(stream)
    before = [snapshot(stream) for stream in streams]
    with pytest.raises(CapacityError, match="all 3 rows"):
        streams[0].fork()
    assert [snapshot(stream) for stream in streams] == before
    streams[2].close()
    assert snapshot(streams[0].fork()) == before[0]


def test_forks_step_together_each_its_own_way(decoder: Decoder) -> None:
    """Beam search: three continuations of one prompt."""
    stream = decoder.stream()
    stream.feed(IDS[:30])
    beams = [stream, stream.fork(), stream.fork()]
    got = [decoder.step(dict(zip(beams, (1, 2, 3), strict=True))) for _ in range(20)]
    for row, token in enumerate((1, 2, 3)):
        beams[row].reset()
        beams[row].feed(IDS[:30])
        for logits in got:
            np.testing.assert_array_equal(decoder.step({beams[row]: token})[beams[row]], logits[beams[row]])
