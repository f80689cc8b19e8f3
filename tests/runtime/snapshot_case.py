"""Streams in every state worth a snapshot, forged snapshot files, and faults while writing one. Ring: S = 2, W = 4, C = 16."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from sinkring.runtime import Decoder, Stream

from tests.runtime.stream_case import IDS, snapshot

PENALISED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.4, "seed": 9, "stop_ids": ()}
GREEDY: dict[str, Any] = {"stop_ids": ()}


def pending(stream: Stream) -> None:
    stream.feed(IDS[:30])
    list(itertools.islice(stream.generate(9, **PENALISED), 5))
    assert stream._pending


def rolled_back(stream: Stream) -> None:
    pending(stream)
    stream.rollback(4)
    assert not stream._logits_stand


def sampled(stream: Stream) -> None:
    stream.feed(IDS[:21])
    for _ in range(3):
        stream.sample(temperature=1.0, top_p=0.95, repetition_penalty=1.4, seed=9)


def stepped(stream: Stream) -> None:
    stream.feed(IDS[:7])
    for token in range(14):
        stream._decoder.step({stream: token})


def emptied(stream: Stream) -> None:
    stream.feed(IDS[:9])
    stream.rollback(9)


STATES: dict[str, Callable[[Stream], object]] = {
    "fresh": lambda stream: None,
    "one token": lambda stream: stream.feed([5]),
    "before the wrap": lambda stream: stream.feed(IDS[:11]),
    "past the wrap": lambda stream: stream.feed(IDS),
    "pending": pending,
    "rolled back": rolled_back,
    "sampled": sampled,
    "stepped": stepped,
    "emptied": emptied,
}


def go_on(stream: Stream) -> tuple[list[int], bytes, list[int], dict[str, Any]]:
    """All that a stream can do next, in the order that uses what it has first."""
    first = list(stream.generate(7, **PENALISED)) if stream.position else []
    logits = stream.feed(IDS[30:52], all_logits=True).tobytes()
    stream.rollback(3)
    return first, logits, [*stream.generate(20, **PENALISED), *stream.generate(9, **GREEDY)], snapshot(stream)


def make(decoder: Decoder, state: str, path: Path) -> Path:
    with decoder.stream() as stream:
        STATES[state](stream)
        stream.snapshot(path)
    return path


def forge(
    path: Path,
    out: Path,
    change: Callable[[Any], Any] = lambda record: record,
    change_tensors: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> Path:
    """A copy changed by a writer who knows how to hash: `change` gets the record and returns what takes its place."""
    data = path.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    metadata["sinkring"] = json.dumps(change(json.loads(metadata["sinkring"])))
    metadata["sha256"] = "0" * 64
    tensors = safetensors.numpy.load(data)
    change_tensors(tensors)
    forged = safetensors.numpy.save(tensors, metadata)
    out.write_bytes(forged.replace(b"0" * 64, hashlib.sha256(forged).hexdigest().encode(), 1))
    return out


STEPS = ("write", "flush", "fsync", "replace")


def fail_at(step: str, action: Callable[[], Any], monkeypatch: Any) -> None:
    """Run `action` instead of a step of writing, for `write` after half of the bytes."""
    real_open = Path.open

    class File:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            if name == step == "flush":
                return action
            return getattr(self._file, name)

        def __enter__(self) -> "File":
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def write(self, data: Any) -> None:
            if step != "write":
                self._file.write(data)
            else:
                self._file.write(data[: len(data) // 2])
                self._file.flush()
                action()

    def open_(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = real_open(path, mode, *arguments, **options)
        return File(file) if "a" in mode or "w" in mode else file

    if step in ("write", "flush"):
        monkeypatch.setattr(Path, "open", open_)
    elif step == "fsync":
        monkeypatch.setattr(os, "fsync", lambda handle: action())
    else:
        monkeypatch.setattr(Path, "replace", lambda *_: action())


def is_one_of(found: tuple[dict[str, Any], dict[str, np.ndarray]], streams: list[Any]) -> int:
    """Which of the streams this is, to the bit."""
    for index, (record, tensors) in enumerate(streams):
        if record == found[0] and all(np.array_equal(tensors[name], found[1][name]) for name in tensors):
            return index
    raise AssertionError("the file is neither of the two that were written")
