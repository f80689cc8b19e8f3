"""What huge pages and denormals taken as zeros are worth on this machine: bundles opened with and without each, measured in turns.

Prints a table: a prompt of 900 tokens into an empty ring, and steps at a full one; medians, the middle half in brackets.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.table import Table
from sinkring.runtime import Decoder, open_bundle
from sinkring.runtime.backends import onnxruntime as backend
from turns import quartiles, run_for_bundles, show

PROMPT = 900
STEPS = 12


def tabulate(found: dict[str, dict[str, dict[str, Any]]]) -> Table:
    table = Table("bundle", "opened", "prompt, tokens/s", "step, ms", "huge pages, MB")
    for bundle, ways in found.items():
        for way, result in ways.items():
            table.add_row(bundle, way, show(result["prompt"], 0), show(result["step"], 1), f"{result['huge_bytes'] / 1e6:.0f}")
    return table


def measure(bundle: Path, rounds: int, threads: int) -> dict[str, dict[str, Any]]:
    """For each way of opening the bundle: prompt (tokens/s), step (ms), each in quartiles, and the bytes that got huge pages."""
    decoders: dict[str, Decoder] = {}
    huge: dict[str, int] = {}
    for way, opened in WAYS.items():
        before = huge_bytes()
        with opened():
            decoders[way] = open_bundle(bundle, threads=threads)
        huge[way] = huge_bytes() - before
    ids = np.random.default_rng(0).integers(0, 1000, 2000)
    prompt: dict[str, list[float]] = {way: [] for way in WAYS}
    step: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 1):
        for way, decoder in decoders.items():
            with decoder.stream() as stream:
                seconds = timed(lambda fed=stream.feed: fed(ids[:PROMPT]))
                stream.feed(ids[:1200])
                steps = [timed(lambda fed=stream.feed, at=index: fed(ids[at : at + 1])) for index in range(STEPS)]
            if round_:  # the first warms up
                prompt[way].append(PROMPT / seconds)
                step[way] += [1e3 * taken for taken in steps]
    for decoder in decoders.values():
        decoder.close()
    return {way: {"prompt": quartiles(prompt[way]), "step": quartiles(step[way]), "huge_bytes": huge[way]} for way in WAYS}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def huge_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def small_pages() -> Iterator[None]:
    used, backend.use_huge_pages = backend.use_huge_pages, lambda since: 0
    try:
        yield
    finally:
        backend.use_huge_pages = used


@contextmanager
def denormals() -> Iterator[None]:
    class Options(ort.SessionOptions):  # type: ignore[misc, no-any-unimported]
        def add_session_config_entry(self, key: str, value: str) -> None:
            super().add_session_config_entry(key, "0" if key == "session.set_denormal_as_zero" else value)

    options, zeros = ort.SessionOptions, backend.DenormalsAsZero
    ort.SessionOptions, backend.DenormalsAsZero = Options, nullcontext
    try:
        yield
    finally:
        ort.SessionOptions, backend.DenormalsAsZero = options, zeros


WAYS = {"as it is": nullcontext, "in pages of 4 KB": small_pages, "with denormals": denormals}

if __name__ == "__main__":
    sys.exit(run_for_bundles(__doc__, 8, measure, tabulate))
