"""Snapshot files that are damaged, foreign, or no snapshots at all. Ring: S = 2, W = 4, C = 16."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from sinkring.exporter.export import export_decoder
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import BundleError, InputError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.snapshot import identity

from tests.models.tiny import tiny_llama
from tests.runtime.snapshot_case import forge, make
from tests.runtime.stream_case import IDS, snapshot


@pytest.fixture(scope="module")
def opened(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def live(opened: Decoder) -> Stream:
    """A stream beside the one that is restored: it must never change."""
    stream = opened.stream()
    stream.feed(IDS[:20])
    next(stream.generate(3, temperature=1.0))
    return stream


@pytest.fixture
def decoder(opened: Decoder, live: Stream) -> Iterator[Decoder]:
    before, rows = snapshot(live), sorted(opened._free)
    yield opened
    assert snapshot(live) == before
    assert sorted(opened._free) == rows, "a row was taken"


@pytest.fixture(scope="module")
def good(opened: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(opened, "pending", tmp_path_factory.mktemp("good") / "good")


def refused(decoder: Decoder, path: Path, match: str | None = None) -> None:
    with pytest.raises(BundleError, match=match) as raised:
        decoder.restore(path)
    message = str(raised.value)
    assert message.startswith(f"snapshot {path}: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400


def test_a_pipe_is_not_waited_for(decoder: Decoder, tmp_path: Path) -> None:
    """Reading one that nobody writes to would block the program for ever."""
    os.mkfifo(tmp_path / "pipe")
    refused(decoder, tmp_path / "pipe", "pipe or socket; give the path of a plain file$")


def test_a_path_with_a_nul_is_refused_by_both(decoder: Decoder, live: Stream) -> None:
    """The system's own answer to such a path is a ValueError."""
    with pytest.raises(BundleError, match=r"^snapshot a.b: cannot be read .*null"):
        decoder.restore("a\0b")
    with pytest.raises(InputError, match=r"^snapshot a.b: could not be written .*null"):
        live.snapshot("a\0b")


def test_the_good_one_is_restored(decoder: Decoder, good: Path) -> None:
    """What the faults below are faults of."""
    decoder.restore(good).close()


def test_every_length_but_the_whole_is_refused(decoder: Decoder, good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "s"
    header = 8 + int.from_bytes(data[:8], "little")
    for length in sorted({*range(40), *range(header - 20, header + 20), *range(0, len(data), 13), *range(len(data) - 20, len(data))}):
        path.write_bytes(data[:length])
        refused(decoder, path)
    path.write_bytes(data + b"\0")
    refused(decoder, path)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF, 0x29], ids=hex)
def test_every_flipped_byte_is_refused(decoder: Decoder, good: Path, tmp_path: Path, flip: int) -> None:
    """0x29 makes a tab of a space: still JSON of the same meaning, and still not what was written."""
    data, path = good.read_bytes(), tmp_path / "s"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for at in range(len(data)):
            file.seek(at)
            file.write(bytes([data[at] ^ flip]))
            refused(decoder, path)
            file.seek(at)
            file.write(data[at : at + 1])
    decoder.restore(path).close()


def test_swapped_tensors_are_refused(decoder: Decoder, good: Path, tmp_path: Path) -> None:
    data = bytearray(good.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start : start + 1024], data[start + 1024 : start + 2048] = data[start + 1024 : start + 2048], data[start : start + 1024]
    assert data != good.read_bytes()
    (tmp_path / "s").write_bytes(data)
    refused(decoder, tmp_path / "s", "sha256 differs")


def test_what_is_no_snapshot(decoder: Decoder, good: Path, tmp_path: Path) -> None:
    tensors = safetensors.numpy.load_file(good)
    wrong: dict[str, bytes] = {
        "empty": b"",
        "text": b"hello\n" * 9,
        "json": b'{"a": 1}',
        "zeros": bytes(5000),
        "plain safetensors": safetensors.numpy.save(tensors),
        "other metadata": safetensors.numpy.save(tensors, {"format": "pt"}),
        "no hash": safetensors.numpy.save(tensors, {"sinkring": "{}"}),
        "no record": safetensors.numpy.save(tensors, {"sha256": "0" * 64}),
        "an empty hash": safetensors.numpy.save(tensors, {"sinkring": '{"format_version": 1}', "sha256": ""}),
        **{
            f"record {text}": safetensors.numpy.save(tensors, {"sinkring": text, "sha256": "0" * 64})
            for text in ("", "null", "5", "[]", "{}", "{", '{"format_version": 1}', '"x"', "\ud83d".encode("utf-8", "replace").decode())
        },
        "no tensors": safetensors.numpy.save({}),
    }
    for name, data in wrong.items():
        path = tmp_path / name.replace("/", "-")
        path.write_bytes(data)
        refused(decoder, path)
    (tmp_path / "folder").mkdir()
    refused(decoder, tmp_path / "folder", "Is a directory")
    refused(decoder, tmp_path / "nothing", "No such file")
    refused(decoder, tmp_path / "text" / "below a file", "Not a directory")
    for path in (decoder.path, decoder.path / "manifest.json", decoder.path / "weights.bin", decoder.path / "decode.heads.onnx"):
        refused(decoder, path)


@pytest.mark.parametrize("version", [2, 0, "1", None, 1.5, [1]])
def test_another_format_version(decoder: Decoder, good: Path, tmp_path: Path, version: Any) -> None:
    path = forge(good, tmp_path / "s", lambda record: {**record, "format_version": version})
    with pytest.raises(BundleError, match=r"format version is .*, this sinkring reads 1"):
        decoder.restore(path)


def test_a_forged_copy_without_change_is_accepted(decoder: Decoder, good: Path, tmp_path: Path) -> None:
    """The control of `forge`: what it changes, and not how it writes, is what is refused."""
    decoder.restore(forge(good, tmp_path / "s")).close()


def test_another_ring_is_refused(decoder: Decoder, tiny_model: Path, good: Path, tmp_path: Path) -> None:
    """Both ways. Policies, dtypes and shapes: see the test of the identity below."""
    export_decoder(tiny_model, tmp_path / "bundle", sinks=2, window=5, chunk=4, targets=["onnxruntime"])
    with open_bundle(tmp_path / "bundle", threads=1) as other:
        refused(other, good, "taken from another bundle")
        assert not other._streams
        refused(decoder, make(other, "pending", tmp_path / "s"), "taken from another bundle")


def test_other_weights_are_refused_even_if_they_are_small(
    decoder: Decoder, tiny_model: Path, good: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One norm weight: it lies in the graphs, so the file of the large weights is the same."""
    folder = tmp_path_factory.mktemp("foreign")
    model = tiny_llama()
    model.model.layers[1].input_layernorm.weight[3] += 1.0
    model.save_pretrained(folder / "model")
    export_decoder(folder / "model", folder / "bundle", sinks=2, window=4, chunk=4, batch=3)
    with open_bundle(folder / "bundle", threads=1) as other:
        assert other.manifest.file("weights.bin").sha256 == decoder.manifest.file("weights.bin").sha256
        refused(other, good, "taken from another bundle")


def test_the_identity_is_of_what_a_stream_depends_on(tiny_bundle_of_three: Path) -> None:
    manifest = Manifest.read(tiny_bundle_of_three)
    mine = identity(manifest)
    (ring,) = manifest.rings
    state = manifest.states[0]
    other_geometry = dataclasses.replace(ring.geometry, window_tokens=3)
    for changed in (
        {"model": dataclasses.replace(manifest.model, source_sha256="0")},
        {"model": dataclasses.replace(manifest.model, vocab_size=98)},
        {"dtype": "float16"},
        {"policy": "native"},
        {"rings": (dataclasses.replace(ring, geometry=other_geometry),)},
        {"states": (dataclasses.replace(state, shape=(3, 2, 16, 9)), *manifest.states[1:])},
        {"states": (dataclasses.replace(state, dtype="float16"), *manifest.states[1:])},
        {"states": (dataclasses.replace(state, name="other"), *manifest.states[1:])},
        {"states": (manifest.states[1], manifest.states[0], *manifest.states[2:])},
        {"states": manifest.states[:-1]},
    ):
        assert identity(dataclasses.replace(manifest, **changed)) != mine, changed.keys()
    wider = tuple(dataclasses.replace(state, shape=(5, *state.shape[1:])) for state in manifest.states)
    for kept in (
        {"batch": 5, "states": wider},
        {"chunk": 3},
        {"graphs": ()},
        {"files": ()},
        {"made_with": {}},
        {"model": dataclasses.replace(manifest.model, source="elsewhere")},
    ):
        assert identity(dataclasses.replace(manifest, **kept)) == mine, kept.keys()
