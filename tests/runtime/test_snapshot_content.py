"""Snapshots whose hash is right and whose content is not, and places where no file may be put. Ring: S = 2, W = 4, C = 16, V = 97."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import Decoder, open_bundle
from sinkring.runtime.errors import BundleError, InputError

from tests.runtime.snapshot_case import forge, make
from tests.runtime.stream_case import IDS


@pytest.fixture(scope="module")
def decoder(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def good(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(decoder, "pending", tmp_path_factory.mktemp("good") / "good")


def stream(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: {**record, "stream": {**record["stream"], **fields}}


@pytest.mark.parametrize(
    "change",
    [
        stream(fed=-3),
        stream(fed="x"),
        stream(fed=True),
        stream(fed=10**9, reached=5),
        stream(reached=2**60),
        stream(pending=[97]),
        stream(pending=[-1]),
        stream(pending="ab"),
        stream(history=[1.5]),
        stream(logits_stand=1),
        stream(sampler={"options": {"temperature": -1}, "state": {}}),
        stream(sampler={"options": {"temperature": 1.0}, "state": {}}),
        stream(sampler=[]),
        stream(unknown=1),
        lambda record: {name: value for name, value in record.items() if name != "stream"},
        lambda record: {name: value for name, value in record.items() if name != "identity"},
        lambda record: {**record, "stream": []},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(decoder: Decoder, good: Path, tmp_path: Path, change: Callable[[Any], Any]) -> None:
    free = sorted(decoder._free)
    with pytest.raises(BundleError, match=r"^snapshot .*use another one$"):
        decoder.restore(forge(good, tmp_path / "s", change))
    assert sorted(decoder._free) == free


@pytest.mark.parametrize(
    "change",
    [
        # numpy would stretch the first over the whole row, and cast the second.
        lambda tensors: tensors.update({"cache.0.k": np.zeros((1, 1, 1, 1), np.float32)}),
        lambda tensors: tensors.update({"cache.0.k": np.zeros((1, 2, 16, 8), np.int8)}),
        lambda tensors: tensors.update({"logits": np.zeros(3, np.float32)}),
        lambda tensors: tensors.pop("cache.1.v"),
        lambda tensors: tensors.update({"cache.9.k": np.zeros(1, np.float32)}),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    decoder: Decoder, good: Path, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None]
) -> None:
    with pytest.raises(BundleError, match=r"^snapshot .*use another one$"):
        decoder.restore(forge(good, tmp_path / "s", change_tensors=change))


def test_only_plain_files_are_replaced(decoder: Decoder, tmp_path: Path) -> None:
    """A rename over a device or a pipe would put a file in its place, for every process on the machine."""
    with decoder.stream() as stream:
        stream.feed(IDS[:5])
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InputError, match="is a device, pipe or socket; give the path of a plain file"):
            stream.snapshot(tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        stream.snapshot(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    decoder.restore(tmp_path / "real").close()
