"""Invariant I6: snapshot, restore, continue is never stopped, bit for bit, on any row, in any process. Ring: S = 2, W = 4, C = 16."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter.export import export_decoder
from sinkring.runtime import Decoder, open_bundle
from sinkring.runtime.errors import CapacityError
from sinkring.runtime.snapshot import identity

from tests.runtime.snapshot_case import PENALISED, STATES, go_on, make
from tests.runtime.stream_case import IDS, assert_close, snapshot

every_state = pytest.mark.parametrize("state", STATES)


@pytest.fixture(scope="module")
def three(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


@pytest.fixture
def decoder(three: Decoder) -> Iterator[Decoder]:
    """All rows free, before and after."""
    assert not three._streams
    yield three
    for stream in list(three._streams.values()):
        stream.close()


@every_state
def test_a_restored_stream_goes_on_bit_for_bit(decoder: Decoder, tmp_path: Path, state: str) -> None:
    stream = decoder.stream()
    STATES[state](stream)
    stream.snapshot(tmp_path / "s")
    # On another row, which held something else before.
    other = decoder.stream()
    decoder.backend.write_row(other.row, {name: np.full_like(row, np.nan) for name, row in decoder.backend.read_row(other.row).items()})
    other.close()
    decoder._free.remove(other.row)
    decoder._free.insert(0, other.row)
    restored = decoder.restore(tmp_path / "s")
    assert restored.row == other.row != stream.row
    assert snapshot(restored) == snapshot(stream)
    assert go_on(restored) == go_on(stream)


@every_state
def test_taking_a_snapshot_changes_nothing(decoder: Decoder, tmp_path: Path, state: str) -> None:
    stream = decoder.stream()
    STATES[state](stream)
    before = snapshot(stream)
    stream.snapshot(tmp_path / "s")
    assert snapshot(stream) == before


def test_a_snapshot_never_changes_afterwards(decoder: Decoder, tmp_path: Path) -> None:
    stream = decoder.stream()
    STATES["pending"](stream)
    stream.snapshot(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    expected = go_on(stream)
    for _ in range(2):
        restored = decoder.restore(tmp_path / "s")
        assert go_on(restored) == expected
        restored.close()
    assert (tmp_path / "s").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_what_was_captured_aliases_nothing(decoder: Decoder) -> None:
    stream = decoder.stream()
    STATES["pending"](stream)
    record, tensors = stream.capture()
    before = json.dumps(record), {name: array.tobytes() for name, array in tensors.items()}
    go_on(stream)
    assert (json.dumps(record), {name: array.tobytes() for name, array in tensors.items()}) == before


def test_snapshots_of_snapshots(decoder: Decoder, tmp_path: Path) -> None:
    """A stream that is stopped after every few tokens, against one that never is."""
    whole, stream = decoder.stream(), decoder.stream()
    whole.feed(IDS[:9])
    stream.feed(IDS[:9])
    expected = list(whole.generate(60, **PENALISED))
    got = []
    for count in (1, 2, 3, 0, 4, 10, 7, 13, 20):
        stream.snapshot(tmp_path / "s")
        stream.close()
        stream = decoder.restore(str(tmp_path / "s"))
        got += list(stream.generate(count, **PENALISED))
    assert got == expected
    assert snapshot(stream) == snapshot(whole)


CONTINUE = """
import hashlib, json, sys
from sinkring.runtime import open_bundle
from tests.runtime.snapshot_case import go_on
with open_bundle(sys.argv[1], threads=1) as decoder:
    for path in sys.argv[2:]:
        stream = decoder.restore(path)
        print(hashlib.sha256(repr(go_on(stream)).encode()).hexdigest())
        stream.close()
"""


def test_another_process_goes_on_bit_for_bit(decoder: Decoder, tmp_path: Path) -> None:
    expected = []
    for state in STATES:
        stream = decoder.stream()
        STATES[state](stream)
        stream.snapshot(tmp_path / state)
        # Dictionaries keep their order, and bytes their text: equal if and only if all is equal.
        expected.append(hashlib.sha256(repr(go_on(stream)).encode()).hexdigest())
        stream.close()
    paths = [str(tmp_path / state) for state in STATES]
    done = subprocess.run(
        [sys.executable, "-c", CONTINUE, str(decoder.path), *paths],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == expected, done.stderr


def test_a_live_stream_sees_nothing_of_a_restore(decoder: Decoder, tmp_path: Path) -> None:
    path = make(decoder, "pending", tmp_path / "s")
    live = [decoder.stream(), decoder.stream()]
    live[0].feed(IDS[:20])
    before = [snapshot(stream) for stream in live]
    restored = decoder.restore(path)
    go_on(restored)
    assert [snapshot(stream) for stream in live] == before
    with pytest.raises(CapacityError, match="all 3 rows"):
        decoder.restore(path)
    assert [snapshot(stream) for stream in live] == before


@pytest.fixture(scope="module")
def same_ring(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Two rows and chunks of 11: C is rounded up to the same 16 slots."""
    out = tmp_path_factory.mktemp("other") / "bundle"
    export_decoder(tiny_model, out, sinks=2, window=4, chunk=11, batch=2, targets=["onnxruntime"])
    return out


@every_state
def test_a_bundle_of_another_batch_and_chunk_goes_on(
    decoder: Decoder, tiny_bundle: Path, same_ring: Path, tmp_path: Path, state: str
) -> None:
    """Other graphs, so equal but for rounding."""
    with decoder.stream() as stream:
        STATES[state](stream)
        stream.snapshot(tmp_path / "s")
        before = snapshot(stream)
        expected = stream.feed(IDS[30:52], all_logits=True)
    for bundle in (tiny_bundle, same_ring):
        with open_bundle(bundle, threads=1) as other:
            assert identity(other.manifest) == identity(decoder.manifest)
            restored = other.restore(tmp_path / "s")
            assert snapshot(restored) == before
            assert_close(restored.feed(IDS[30:52], all_logits=True), expected)


def test_the_sampler_goes_on_in_another_batch(tiny_bundle: Path, same_ring: Path, tmp_path: Path) -> None:
    """The random sequence and the penalty are not the graph's: with logits equal but for rounding, the tokens are the same."""
    with open_bundle(tiny_bundle, threads=1) as one, open_bundle(same_ring, threads=1) as two:
        stream = one.stream()
        STATES["pending"](stream)
        stream.snapshot(tmp_path / "s")
        restored = two.restore(tmp_path / "s")
        options: dict[str, Any] = PENALISED
        assert list(restored.generate(12, **options)) == list(stream.generate(12, **options))
