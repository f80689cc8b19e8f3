"""I8: nothing grows. Addresses, anonymous memory and Python's allocations after many steps at a full ring; time is told, not judged."""

import gc
import time
import tracemalloc

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Subject
from sinkring.exporter.process_memory import memory_bytes
from sinkring.runtime.decoder import Decoder
from sinkring.runtime.stream import HISTORY_TOKENS, Stream

QUICK_STEPS, FULL_STEPS = 500, 100_000
WARM_STEPS = 100
BLOCK_STEPS = 50
# Allocators take memory by the page and in arenas; one float kept in each of 500 steps is caught by Python's own count, below.
RESIDENT_TOLERANCE_BYTES = 1 << 20
PYTHON_TOLERANCE_BYTES = 16_384
# What grows does so in every part of the run; what another thread of the process or an allocator takes once, in one of them.
PARTS = 5


def check_growth(subject: Subject) -> Check:
    """Step all rows at a full ring: 500 times, in the full suite 100,000 times or as often as the budget allows."""
    wanted = FULL_STEPS if subject.full else QUICK_STEPS
    with subject.open() as decoder:
        streams = [decoder.stream() for _ in range(subject.manifest.batch)]
        # From before the histories are filled: numbers that they drop are then counted out as those that come are counted in.
        tracemalloc.start()
        try:
            _fill(subject, streams)
            _steps(subject, decoder, streams, WARM_STEPS)
            addresses = _addresses(decoder)
            # Made before the count begins, or the record of the time would be what grows.
            block_ms = np.zeros(-(-wanted // BLOCK_STEPS))
            levels, began, done = [_levels()], time.perf_counter(), 0
            for part in range(1, PARTS + 1):
                done = _until(subject, decoder, streams, done, wanted * part // PARTS, began + subject.budget_s * part / PARTS, block_ms)
                levels.append(_levels())
            subject.say("I8", wanted, wanted)
            python_grown, resident_grown = (int(grown) for grown in PARTS * np.median(np.diff(levels, axis=0), axis=0))
        finally:
            tracemalloc.stop()
        moved = [name for name, address in _addresses(decoder).items() if addresses[name] != address]
        position = streams[0].position
    time_told = _slope(block_ms[: done // BLOCK_STEPS])
    share = max(resident_grown / RESIDENT_TOLERANCE_BYTES, python_grown / PYTHON_TOLERANCE_BYTES, 0.0)
    budget = "" if done >= wanted else f", of {wanted:,} as many as fit into {subject.budget_s:g} s"
    return Check(
        "I8",
        f"{done:,} steps{budget}, up to position {position:,}, all {len(streams)} rows, {len(addresses)} buffers",
        "growth, in parts of what is noise",
        share,
        1.0,
        share <= 1 and not moved,
        f"addresses {f'moved: {moved[0]}' if moved else 'the same'}; by the median of {PARTS} parts anonymous memory "
        f"{resident_grown:+,} bytes of {RESIDENT_TOLERANCE_BYTES:,}, Python's allocations {python_grown:+,} of "
        f"{PYTHON_TOLERANCE_BYTES:,}; {time_told}",
    )


def _fill(subject: Subject, streams: list[Stream]) -> None:
    """Until the ring is full and so is the stream's own bounded history of tokens, which is full of Python numbers from then on."""
    most = subject.most_tokens
    wanted = HISTORY_TOKENS + subject.geometry.capacity + 1 if most is None else subject.full_at
    text = np.resize(subject.ids, wanted)
    for stream in streams:
        stream.feed(text)


def _steps(subject: Subject, decoder: Decoder, streams: list[Stream], steps: int) -> None:
    ids, most = subject.ids, subject.most_tokens
    for _ in range(steps):
        if most is not None and streams[0].position >= most:
            for stream in streams:
                stream.reset()
                stream.feed(ids[:1])
        decoder.step({stream: int(ids[stream.position % len(ids)]) for stream in streams})


def _levels() -> tuple[int, int]:
    """Bytes that Python holds, and bytes of anonymous memory that the process holds."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0], memory_bytes()["RssAnon"]


def _until(
    subject: Subject, decoder: Decoder, streams: list[Stream], done: int, wanted: int, end_s: float, block_ms: NDArray[np.float64]
) -> int:
    """Step on from `done` to `wanted` or until the clock shows end_s; returns the steps done. block_ms takes each block's ms a step."""
    while done < wanted and time.perf_counter() < end_s:
        block_began = time.perf_counter()
        _steps(subject, decoder, streams, BLOCK_STEPS)
        block_ms[done // BLOCK_STEPS] = (time.perf_counter() - block_began) * 1e3 / BLOCK_STEPS
        done += BLOCK_STEPS
        if done % (10 * BLOCK_STEPS) == 0:
            subject.say("I8", done, len(block_ms) * BLOCK_STEPS)
    return done


def _addresses(decoder: Decoder) -> dict[str, int]:
    backend = decoder.backend
    own = {"input": backend.input, "position": backend.position, "logits": backend.logits}
    own |= {f"write index {number}": buffer for number, buffer in enumerate(backend.write_index)}
    return {**backend.addresses(), **{name: array.ctypes.data for name, array in own.items()}}


def _slope(block_ms: NDArray[np.float64]) -> str:
    median = float(np.median(block_ms))
    if len(block_ms) < 4:
        return f"{median:.3g} ms a step"
    thousands = (np.arange(len(block_ms)) + 0.5) * BLOCK_STEPS / 1000
    (slope, _), covariance = np.polyfit(thousands, block_ms, 1, cov=True)
    error = float(np.sqrt(covariance[0, 0]))
    return f"{median:.3g} ms a step, slope {slope:+.2g} ± {error:.2g} ms per 1,000 steps (allocations traced; not judged)"
