"""Bundles of the form of TensorRT 10.3 in ONNX Runtime: the runtime writes the new rows, and nobody can tell. S = 2, W = 4, C = 16."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter.export import export_decoder
from sinkring.runtime import Decoder, open_bundle
from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.snapshot import identity

from tests.exporter.tiny_bundle import broken_copy
from tests.runtime.stream_case import IDS, assert_close


@pytest.fixture(scope="module")
def rows_bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As tiny_bundle_of_three, with graphs of that form alone."""
    out = tmp_path_factory.mktemp("rows") / "bundle"
    export_decoder(tiny_model, out, sinks=2, window=4, chunk=4, batch=3, slack=10, targets=["tensorrt-10.3"])
    return out


@pytest.fixture(scope="module")
def in_place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("in-place") / "bundle"
    export_decoder(tiny_model, out, sinks=2, window=4, chunk=4, batch=3, slack=10, targets=["onnxruntime"])
    return out


@pytest.fixture
def decoder(rows_bundle: Path) -> Iterator[Decoder]:
    with open_bundle(rows_bundle, threads=1) as opened:
        yield opened


def test_every_backend_runs_the_portable_graphs_and_only_they_are_there(rows_bundle: Path) -> None:
    manifest = Manifest.read(rows_bundle)
    for target in ("onnxruntime", "tensorrt-rtx", "tensorrt", "tensorrt-10.3"):
        assert manifest.graph("decode", target).update == "rows"
    with pytest.raises(BundleError, match="no decode graph for target 'nonesuch', only for"):
        manifest.graph("decode", "nonesuch")


def test_a_step_writes_its_own_slots_and_no_idle_row(decoder: Decoder) -> None:
    streams = [decoder.stream() for _ in range(3)]
    for stream, length in zip(streams, (30, 22, 17), strict=True):
        stream.feed(IDS[:length])
    before = [decoder.backend.read_row(row) for row in range(3)]
    decoder.step({streams[0]: 5, streams[2]: 7})
    geometry = decoder.manifest.rings[0].geometry
    for row, position in ((0, 30), (1, None), (2, 17)):
        for name, held in decoder.backend.read_row(row).items():
            changed = (held != before[row][name]).any(axis=(0, 1, 3)).nonzero()[0].tolist()
            assert changed == ([] if position is None else [geometry.slot(position)]), f"{name} of row {row}"


def test_a_snapshot_of_either_form_goes_on_in_the_other(decoder: Decoder, in_place: Path, tmp_path: Path) -> None:
    """What a ring holds after a call is the same, so the forms share snapshots: at any fill, in the middle of a ring."""
    assert identity(decoder.manifest) == identity(Manifest.read(in_place))
    with open_bundle(in_place, threads=1) as other:
        for length in (1, 9, 37):
            for source, target in ((decoder, other), (other, decoder)):
                stream = source.stream()
                stream.feed(IDS[:length])
                stream.snapshot(tmp_path / "snapshot")
                restored = target.restore(tmp_path / "snapshot")
                for name, held in source.backend.read_row(stream.row).items():
                    np.testing.assert_array_equal(held, target.backend.read_row(restored.row)[name], err_msg=name)
                assert_close(restored.feed(IDS[length:], all_logits=True), stream.feed(IDS[length:], all_logits=True))
                stream.close()
                restored.close()


def test_a_chunk_without_logits_gives_out_the_same_rows(decoder: Decoder) -> None:
    backend = decoder.backend
    found = [backend.prefill(row, IDS[:4], 0, (0,), wanted).copy() for row, wanted in enumerate((0, 1, 4))]
    assert [len(logits) for logits in found] == [0, 1, 4]
    kept = [backend.read_row(row) for row in range(3)]
    for name, held in kept[1].items():
        assert (held != 0).any(axis=(0, 1, 3)).nonzero()[0].tolist() == [0, 1, 2, 3], name
        for other in (0, 2):
            np.testing.assert_array_equal(kept[other][name], held, err_msg=name)


def test_rollback_and_fork_are_as_if_never_fed(decoder: Decoder) -> None:
    stream = decoder.stream()
    stream.feed(IDS[:25])
    fork = stream.fork()
    expected = stream.feed(IDS[25:33], all_logits=True)
    stream.rollback(8)
    np.testing.assert_array_equal(stream.feed(IDS[25:33], all_logits=True), expected)
    np.testing.assert_array_equal(fork.feed(IDS[25:33], all_logits=True), expected)


def test_addresses_stay(decoder: Decoder) -> None:
    before = decoder.backend.addresses()
    stream = decoder.stream()
    stream.feed(IDS)
    list(stream.generate(9))
    stream.reset()
    assert decoder.backend.addresses() == before


def test_a_manifest_that_says_the_other_form_is_refused(rows_bundle: Path, in_place: Path, tmp_path: Path) -> None:
    """Bound as caches, rows would land in the first slots; bound as rows, caches would be written past their end."""

    def say(form: str) -> Callable[[dict[str, Any]], None]:
        return lambda raw: [graph.update(update=form) for graph in raw["graphs"]].clear()

    for bundle, form in ((rows_bundle, "in_place"), (in_place, "rows")):
        with pytest.raises(BundleError, match=r"output 'cache.0.k.rows' is in the"):
            open_bundle(broken_copy(bundle, tmp_path / form, say(form)), threads=1)
