"""I6: snapshot, restore, continue = never stopped, bit for bit; it never changes afterwards; a damaged or foreign one is refused.

The full suite also kills a process, again and again, while it writes one.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.snapshot_writer import wrote
from sinkring.exporter.conformance.subject import Logits, Subject, feed_in_pieces, largest_difference
from sinkring.runtime.decoder import Decoder
from sinkring.runtime.errors import BundleError
from sinkring.runtime.snapshot import read_snapshot
from sinkring.runtime.stream import Stream

TOKENS = 16
SAMPLED = 6
KILLS = 8


def check_snapshots(subject: Subject) -> Check:
    """A stream whose ring is full goes to a file and to memory; it goes on, and so do its restored selves, elsewhere and later."""
    path = subject.scratch / "stream.snapshot"
    at, count = subject.full_at, TOKENS
    if (most := subject.most_tokens) is not None:
        at = max(1, min(at, most - TOKENS - SAMPLED))
        count = min(TOKENS, most - SAMPLED - at)
    faults: list[str] = []
    with subject.open() as decoder, subject.open() as other:
        stream = decoder.stream()
        stream.feed(subject.ids[:at])
        # A sampler under way is part of the stream: its random sequence goes on, too.
        next(stream.generate(1, temperature=1.0, seed=6, stop_ids=()))
        stream.rollback(1)
        stream.snapshot(path)
        kept = stream.capture()
        lived = _go_on(stream, subject.ids[at : at + count])
        off = subject.off(lived[0], at)
        worst = 0.0
        stands = _spare_stream(decoder, stream)
        for name, restored in (
            ("restored in another decoder", other.restore(path)),
            ("captured in memory, and installed after the stream went on", _installed(stands, kept)),
        ):
            again = _go_on(restored, subject.ids[at : at + count])
            difference = largest_difference(again[0], lived[0])
            worst = max(worst, difference)
            if difference:
                faults.append(f"{name}: logits differ by {difference:.2e}")
            if again[1] != lived[1]:
                faults.append(f"{name}: sampled {again[1]}, never stopped {lived[1]}")
            restored.close()
        refused = _damaged_ones(subject, other, path, faults)
    killed = _kill_writers(subject, faults) if subject.full else "not in the quick suite"
    oracle = f"{off:.2e} from the oracle, where {subject.tolerance:.2e} is allowed"
    return Check(
        "I6",
        f"at position {at}, by file and in memory, {count} tokens and {SAMPLED} sampled after it; {refused} damaged or foreign files; "
        f"kill -9 while writing: {killed}",
        "max |Δlogit| to never stopped",
        worst,
        0.0,
        not faults and worst == 0 and off <= subject.tolerance,
        "; ".join([*faults[:4], oracle]),
    )


def _go_on(stream: Stream, ids: NDArray[np.int64]) -> tuple[Logits, list[int]]:
    """Logits of ids [n], and what is sampled after them."""
    logits = feed_in_pieces(stream, ids, (1, 1, 3, 2))
    return logits, list(stream.generate(SAMPLED, temperature=1.0, seed=6, stop_ids=()))


def _spare_stream(decoder: Decoder, stream: Stream) -> Stream:
    """Another row of the decoder where there is one; else the stream's own, emptied."""
    if decoder.manifest.batch > 1:
        return decoder.stream()
    stream.reset()
    return stream


def _installed(stream: Stream, kept: tuple[dict, dict]) -> Stream:
    stream.install(*kept)
    return stream


def _damaged_ones(subject: Subject, decoder: Decoder, path: Path, faults: list[str]) -> int:
    """Every damaged copy must be refused, and a live stream beside it must not notice. Returns how many were tried."""
    good = path.read_bytes()
    rng = np.random.default_rng(6)
    cuts = [0, 7, 8, len(good) // 2, len(good) - 1]
    places = [0, 9, 200, len(good) // 2, len(good) - 1, *(int(place) for place in rng.integers(0, len(good), 200 if subject.full else 20))]
    copies = [(f"cut to {length} bytes", good[:length]) for length in cuts]
    copies += [(f"byte {place} changed", good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :]) for place in places]
    bad = subject.scratch / "damaged.snapshot"
    live = decoder.stream()
    live.feed(subject.ids[:2])
    before = live.capture()
    for name, data in copies:
        bad.write_bytes(data)
        _must_refuse(decoder, bad, name, faults)
    _must_refuse(decoder, subject.scratch / "none.snapshot", "a missing file", faults)
    foreign = dataclasses.replace(subject.manifest, policy="native" if subject.manifest.policy == "streaming" else "streaming")
    try:
        read_snapshot(path, foreign)
        faults.append("a snapshot of another bundle was accepted")
    except BundleError:
        pass
    after = live.capture()
    if before[0] != after[0] or any(before[1][name].tobytes() != after[1][name].tobytes() for name in before[1]):
        faults.append("a refused snapshot has changed a live stream")
    live.close()
    return len(copies) + 2


def _must_refuse(decoder: Decoder, path: Path, name: str, faults: list[str]) -> None:
    try:
        decoder.restore(path).close()
    except BundleError:
        return
    except Exception as error:
        faults.append(f"{name}: ended in {type(error).__name__}: {error}")
        return
    faults.append(f"{name}: was accepted")


def _kill_writers(subject: Subject, faults: list[str]) -> str:
    """Kill a process that writes two streams in turn to one path; what lies there must always be one of the two."""
    path = subject.scratch / "killed.snapshot"
    rng = np.random.default_rng(66)
    command = [sys.executable, "-m", "sinkring.exporter.conformance.snapshot_writer", str(subject.path), subject.backend, str(path)]
    with subject.open() as decoder:
        for kill in range(KILLS):
            subject.say("I6", kill, KILLS)
            child = subprocess.Popen([*command, subject.sabotage or "-"], stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            try:
                if not child.stdout.readline():
                    faults.append(f"the writing process ended with status {child.wait()}")
                    return f"{kill} times"
                time.sleep(float(rng.uniform(0.0, 0.05)))
            finally:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                child.stdout.close()
            try:
                with decoder.restore(path) as stream:
                    if stream.position not in wrote(subject.manifest):
                        faults.append(f"after a kill the snapshot is at position {stream.position}, neither of the two")
            except BundleError as error:
                faults.append(f"after a kill the snapshot cannot be restored: {error}")
    subject.say("I6", KILLS, KILLS)
    return f"{KILLS} times"
