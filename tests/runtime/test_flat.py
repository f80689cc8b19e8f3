"""Nothing grows: addresses, bytes of the process, Python's allocations, over thousands of steps past the wrap."""

import ctypes
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil
import pytest
from sinkring.runtime import Stream, open_bundle

STEPS = 5_000
MB = 1 << 20
# Allocators take memory by the page; growth of one small object in each step is 160 kB and more.
RSS_TOLERANCE_BYTES = 1 * MB
PYTHON_TOLERANCE_BYTES = 16_384
# Of linux/prctl.h.
PR_SET_THP_DISABLE = 41


@pytest.fixture
def small_pages() -> Iterator[None]:
    """No huge page of the system's own making: for one byte that nobody asked for it would show 2 MB."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    if prctl:
        assert prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    yield
    if prctl:
        assert prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0


def feed_by_one(stream: Stream, steps: int) -> None:
    for step in range(steps):
        stream.feed([step % 97])


def feed_by_chunks(stream: Stream, steps: int) -> None:
    """Every length from 1 to 9, so that each shape comes again and again."""
    for step in range(steps // 5):
        stream.feed(np.arange(1 + step % 9))


def feed_all_logits(stream: Stream, steps: int) -> None:
    for step in range(steps // 5):
        stream.feed(np.arange(1 + step % 9), all_logits=True)


def generate(stream: Stream, steps: int) -> None:
    for _ in stream.generate(steps, temperature=1.0, top_p=0.9, repetition_penalty=1.1, stop_ids=()):
        pass


def turns(stream: Stream, steps: int) -> None:
    for step in range(steps // 10):
        stream.feed([1, 2, 3])
        for _ in stream.generate(6, temperature=0.5 + step % 2, stop_ids=()):
            pass


def resets(stream: Stream, steps: int) -> None:
    for _ in range(steps // 10):
        stream.feed(np.arange(20))
        stream.reset()
    stream.feed([1])


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("rows", "work"), [(1, feed_by_one), (1, feed_by_chunks), (1, turns), (3, generate), (3, feed_all_logits), (3, resets)]
)
def test_nothing_grows(request: pytest.FixtureRequest, rows: int, work: Callable[[Stream, int], None]) -> None:
    bundle: Path = request.getfixturevalue({1: "tiny_bundle", 3: "tiny_bundle_of_three"}[rows])
    with open_bundle(bundle, threads=1) as decoder:
        stream = decoder.stream()
        # Until every buffer and cache of the interpreter is warm: the history of a stream alone takes 1024 tokens to fill.
        stream.feed(np.arange(1200) % 97)
        work(stream, 1000)
        addresses, process = decoder.backend.addresses(), psutil.Process()
        gc.collect()
        tracemalloc.start()
        try:
            work(stream, 500)
            gc.collect()
            python_before = tracemalloc.get_traced_memory()[0]
            work(stream, 1500)
            gc.collect()
            python_grown = tracemalloc.get_traced_memory()[0] - python_before
        finally:
            tracemalloc.stop()
        rss_before = process.memory_info().rss
        started = perf_counter()
        work(stream, STEPS // 2)
        middle = perf_counter()
        work(stream, STEPS // 2)
        ended = perf_counter()
        rss_grown = process.memory_info().rss - rss_before
        assert decoder.backend.addresses() == addresses
    print(f"{work.__name__}, {rows} rows: first half {middle - started:.2f} s, second half {ended - middle:.2f} s")
    print(f"resident bytes {rss_grown:+}, Python's {python_grown:+}")
    assert rss_grown <= RSS_TOLERANCE_BYTES
    assert python_grown <= PYTHON_TOLERANCE_BYTES
