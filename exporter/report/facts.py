"""What the report tells: read from the bundle, proven against PyTorch, and measured on this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from sinkring.exporter.inspect import Inspection, inspect_bundle
from sinkring.exporter.machine import Machine, describe_machine
from sinkring.exporter.perplexity import Perplexity, measure_perplexity
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.exporter.validate import validate_bundle
from sinkring.exporter.verdict import Validation
from sinkring.runtime.decoder import open_bundle
from sinkring.runtime.errors import InputError

Progress = Callable[[str, int, int], None]

# Two points a curve would show no more, and a longer run would tell the same.
SPEED_STEPS = 256
_POINTS = 32


@dataclass(frozen=True)
class Speed:
    """Decode steps at a full ring, one stream. memory: (position, resident bytes) as the stream goes on; times in ms."""

    steps: int
    median_ms: float
    p99_ms: float
    prefill_tokens_per_second: float
    cache_bytes: int
    memory: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Facts:
    """validation and perplexity are None where they were not asked for."""

    inspection: Inspection
    validation: Validation | None
    speed: Speed
    perplexity: Perplexity | None
    machine: Machine


def gather_facts(bundle: Path, *, steps: int, text: str | None, bundles: Path, threads: int | None, progress: Progress | None) -> Facts:
    """steps: to compare with PyTorch, 0 for none. text: to measure the perplexity on (see `read_text`), None for none.

    Raises what `inspect_bundle`, `validate_bundle` and `measure_perplexity` raise.
    """
    if steps < 0:
        raise InputError(f"steps={steps}: must be 0 or more")
    inspection = inspect_bundle(bundle)
    # First, while torch is not loaded: what is measured is the runtime's memory.
    speed = measure_speed(bundle, threads, progress)
    validation = validate_bundle(bundle, steps, progress=progress) if steps else None
    perplexity = None
    if text is not None:
        perplexity = measure_perplexity(bundle, text, starts=4, bundles=bundles, threads=threads, progress=progress)
    return Facts(inspection, validation, speed, perplexity, describe_machine())


def measure_speed(bundle: Path, threads: int | None, progress: Progress | None = None) -> Speed:
    """Fill the ring (of a linear cache, half of it), then step, and watch time and memory."""
    process = psutil.Process()
    with open_bundle(bundle, threads=threads, verify=False) as decoder, decoder.stream() as stream:
        manifest = decoder.manifest
        geometry = manifest.rings[0].geometry
        most = geometry.most_tokens
        fill = geometry.capacity + 1 if most is None else most // 2
        steps = SPEED_STEPS if most is None else min(SPEED_STEPS, most - fill)
        ids = read_reference_ids(bundle, manifest, fill + steps).ids
        began = time.perf_counter()
        stream.feed(ids[:fill])
        fed_seconds = time.perf_counter() - began
        times, memory = np.zeros(steps), []
        for index, token in enumerate(ids[fill:].tolist()):
            if index % max(steps // _POINTS, 1) == 0:
                memory.append((stream.position, int(process.memory_info().rss)))
                if progress:
                    progress("speed", index, steps)
            began = time.perf_counter()
            stream.feed([token])
            times[index] = (time.perf_counter() - began) * 1e3
        if progress:
            progress("speed", steps, steps)
        memory.append((stream.position, int(process.memory_info().rss)))
        return Speed(
            steps=steps,
            median_ms=float(np.median(times)),
            p99_ms=float(np.percentile(times, 99)),
            prefill_tokens_per_second=fill / fed_seconds,
            cache_bytes=decoder.cache_bytes,
            memory=tuple(memory),
        )
