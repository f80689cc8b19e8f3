"""A decoder and its rows: three streams on one bundle, S = 2, W = 4, C = 16."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import BundleError, CapacityError, InputError, NumericalError, UnsupportedError

V = 97
IDS = np.random.default_rng(6).integers(0, V, (3, 60))


@pytest.fixture
def decoder(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


def state(stream: Stream) -> dict[str, bytes]:
    return {name: row.tobytes() for name, row in stream._decoder.backend.read_row(stream.row).items()}


def test_rows_are_independent_bit_for_bit(decoder: Decoder) -> None:
    streams = [decoder.stream() for _ in range(3)]
    for stream, ids in zip(streams, IDS, strict=True):
        stream.feed(ids[:20])
    for round_ in range(3):
        for busy, stream in enumerate(streams):
            others = [other for other in streams if other is not stream]
            before = [(state(other), other._logits.tobytes()) for other in others]
            mine = state(stream)
            stream.feed(IDS[busy, 20 + 10 * round_ : 29 + 10 * round_])
            next(stream.generate(1, stop_ids=()))
            stream.feed([1])
            assert state(stream) != mine
            if round_ == 2:
                stream.reset()
                stream.feed(IDS[busy])
            assert [(state(other), other._logits.tobytes()) for other in others] == before


def test_a_row_among_busy_neighbours_equals_a_solo_run(decoder: Decoder, tiny_bundle_of_three: Path) -> None:
    one, two = decoder.stream(), decoder.stream()
    together = []
    for start in range(0, 60, 5):
        one.feed(IDS[0, start : start + 5])
        two.feed(IDS[1, start : start + 3])
        if start % 15 == 0:
            one.reset()
        together.append(two.feed(IDS[1, start + 3 : start + 5]))
    with open_bundle(tiny_bundle_of_three, threads=1) as other:
        solo = other.stream()
        for start, expected in zip(range(0, 60, 5), together, strict=True):
            solo.feed(IDS[1, start : start + 3])
            np.testing.assert_array_equal(solo.feed(IDS[1, start + 3 : start + 5]), expected)


def test_poison_in_a_row_stays_there(decoder: Decoder) -> None:
    sick, well = decoder.stream(), decoder.stream()
    expected = well.feed(IDS[0], all_logits=True)
    well.reset()
    decoder.backend.write_row(sick.row, {name: np.full_like(row, np.nan) for name, row in decoder.backend.read_row(sick.row).items()})
    with pytest.raises(NumericalError, match="not finite"):
        sick.feed([1])
    np.testing.assert_array_equal(well.feed(IDS[0], all_logits=True), expected)


def test_a_row_that_is_taken_again_is_fresh(decoder: Decoder) -> None:
    streams = [decoder.stream() for _ in range(3)]
    expected = streams[0].feed(IDS[0], all_logits=True)
    for poison in (None, np.nan, np.inf):
        row = streams[1].row
        streams[1].feed(IDS[1])
        if poison is not None:
            decoder.backend.write_row(row, {name: np.full_like(old, poison) for name, old in decoder.backend.read_row(row).items()})
        streams[1].close()
        streams[1] = decoder.stream()
        assert (streams[1].row, streams[1].position) == (row, 0)
        np.testing.assert_array_equal(streams[1].feed(IDS[0], all_logits=True), expected)


def test_more_streams_than_rows(decoder: Decoder) -> None:
    streams = [decoder.stream() for _ in range(3)]
    assert sorted(stream.row for stream in streams) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(CapacityError, match="all 3 rows"):
            decoder.stream()
    streams[1].close()
    streams[1].close()  # twice must not free the row twice
    assert decoder.stream().row == streams[1].row
    with pytest.raises(CapacityError):
        decoder.stream()
    with pytest.raises(CapacityError, match="closed"):
        streams[1].feed([1])


def test_a_stream_gives_its_row_back_at_the_end_of_a_block_that_fails(decoder: Decoder) -> None:
    with pytest.raises(ZeroDivisionError), decoder.stream(), decoder.stream(), decoder.stream():
        raise ZeroDivisionError
    assert len([decoder.stream() for _ in range(3)]) == 3


def test_the_decoder_closed_while_streams_live(tiny_bundle_of_three: Path) -> None:
    with open_bundle(tiny_bundle_of_three, threads=1) as decoder:
        stream, idle = decoder.stream(), decoder.stream()
        kept = stream.feed(IDS[0], all_logits=True)
        before = kept.copy()
        loop = stream.generate(5)
        next(loop)
    decoder.close()
    for call in (lambda: stream.feed([1]), lambda: next(loop), stream.reset, lambda: idle.generate(1), decoder.stream):
        with pytest.raises(CapacityError, match=r"decoder of .* is closed; open the bundle again"):
            call()
    stream.close()
    np.testing.assert_array_equal(kept, before)


def test_decoders_of_one_bundle_are_independent(tiny_bundle: Path) -> None:
    with open_bundle(tiny_bundle, threads=1) as first, open_bundle(tiny_bundle, threads=1) as second:
        assert not set(first.backend.addresses().values()) & set(second.backend.addresses().values())
        one, two = first.stream(), second.stream()
        expected = one.feed(IDS[0])
        two.feed(IDS[1])
        first.close()
        two.reset()
        np.testing.assert_array_equal(two.feed(IDS[0]), expected)


@pytest.mark.parametrize(("batch", "calls"), list(itertools.product((1, 3), ([60], [1] * 60, [7, 13, 40]))))
def test_batch_and_cut_change_nothing_but_rounding(tiny_bundle: Path, tiny_bundle_of_three: Path, batch: int, calls: list[int]) -> None:
    with open_bundle(tiny_bundle, threads=1) as decoder:
        expected = decoder.stream().feed(IDS[2], all_logits=True)
    with open_bundle({1: tiny_bundle, 3: tiny_bundle_of_three}[batch], threads=1) as decoder:
        stream = decoder.stream()
        ends = list(itertools.accumulate(calls))
        got = np.concatenate([stream.feed(IDS[2, end - n : end], all_logits=True) for end, n in zip(ends, calls, strict=True)])
    error = np.abs(got - expected)
    assert error.max() <= 1e-4, f"max {error.max():.2e}, mean {error.mean():.2e}"


def test_the_fused_graphs_agree(tiny_bundle: Path) -> None:
    """The file that a TensorRT engine is built from, run by ONNX Runtime."""
    with open_bundle(tiny_bundle, threads=1) as decoder, open_bundle(tiny_bundle, target="tensorrt-rtx", threads=1) as fused:
        one, two = decoder.stream(), fused.stream()
        error = np.abs([one.feed([token]) - two.feed([token]) for token in IDS[0]])
    assert error.max() <= 1e-4, f"max {error.max():.2e}, mean {error.mean():.2e}"


def test_cache_bytes_is_the_formula(decoder: Decoder) -> None:
    # (S + M) * 2 * layers * G * D * 4 bytes * B
    assert decoder.cache_bytes == 16 * 2 * 2 * 2 * 8 * 4 * 3 == decoder.manifest.cache_bytes_formula


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"threads": 0}, InputError, "threads=0"),
        ({"threads": -1}, InputError, "threads=-1"),
        ({"threads": "2"}, InputError, "threads='2'"),
        ({"threads": 1.5}, InputError, r"threads=1\.5"),
        ({"threads": True}, InputError, "threads=True"),
        ({"thread": 1}, InputError, "'thread' is not known"),
        ({"backend": "cuda"}, UnsupportedError, "'cuda' is not known; use onnxruntime"),
        ({"target": "jetson"}, BundleError, r"target 'jetson', only for \['onnxruntime', 'tensorrt', 'tensorrt-rtx'\]"),
    ],
    ids=str,
)
def test_options_are_refused_by_name(tiny_bundle: Path, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        open_bundle(tiny_bundle, **options)
