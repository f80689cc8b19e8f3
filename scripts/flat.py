"""Does anything grow? Decode at a full ring for thousands of steps and watch addresses, memory and time.

A second decoder of the same bundle runs beside it, block for block, on a stream that is made anew for each block: what the machine does to
both cancels in the difference. Prints one JSON object: cache addresses equal, resident and anonymous bytes before and after, and the slope
of the difference in step time, old minus young, with its standard error. A stream that does not age has a slope within its error of zero.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.process_memory import memory_bytes
from sinkring.runtime import Stream, open_bundle

ROOT = Path(__file__).resolve().parents[1]
BLOCK_STEPS = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=ROOT / "bundles" / "smollm2", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=5000, help="after the ring is full (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    args = parser.parse_args()
    with open_bundle(args.bundle, threads=args.threads) as decoder, open_bundle(args.bundle, threads=args.threads, verify=False) as other:
        manifest = decoder.manifest
        old, young = decoder.stream(), other.stream()
        rng = np.random.default_rng(0)
        capacity = max(ring.geometry.capacity for ring in manifest.rings)
        start = rng.integers(0, manifest.model.vocab_size, capacity)
        old.feed(start)
        blocks = np.array_split(rng.integers(0, manifest.model.vocab_size, args.steps), args.steps // BLOCK_STEPS)
        old_ms, young_ms = [], []
        for index, block in enumerate([blocks[0], *blocks]):
            young.reset()
            young.feed(start)
            times = [timed_steps(stream, block) for stream in (old, young)]
            if index == 0:  # Both have warmed up.
                addresses, before = decoder.backend.addresses(), memory_bytes()
                continue
            old_ms.append(times[0])
            young_ms.append(times[1])
        after = memory_bytes()
        aged = slope(np.median(old_ms, axis=1) - np.median(young_ms, axis=1))
        result = {
            "machine": dataclasses.asdict(describe_machine()),
            "versions": {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__},
            "bundle": args.bundle.name,
            "capacity_slots": capacity,
            "steps": len(old_ms) * BLOCK_STEPS,
            "position": old.position,
            "cache_bytes": decoder.cache_bytes,
            "addresses_unchanged": addresses == decoder.backend.addresses(),
            "memory_before_bytes": before,
            "memory_after_bytes": after,
            "resident_growth_bytes": after["VmRSS"] - before["VmRSS"],
            "anonymous_growth_bytes": after["RssAnon"] - before["RssAnon"],
            "step_ms": quartiles(np.concatenate(old_ms)),
            "young_step_ms": quartiles(np.concatenate(young_ms)),
            "slope_of_difference_ms_per_1000_steps": aged,
        }
    print(json.dumps(result, indent=2))
    return 0


def timed_steps(stream: Stream, tokens: np.ndarray) -> np.ndarray:
    """Milliseconds of each step."""
    times = np.zeros(len(tokens))
    for index, token in enumerate(tokens):
        began = time.perf_counter()
        stream.feed([token])
        times[index] = (time.perf_counter() - began) * 1e3
    return times


def quartiles(samples: np.ndarray) -> dict[str, float]:
    return {
        name: round(float(value), 3) for name, value in zip(("p25", "median", "p75"), np.percentile(samples, [25, 50, 75]), strict=True)
    }


def slope(block_ms: np.ndarray) -> dict[str, float]:
    """Least squares over the blocks, in ms per 1000 steps, with its standard error."""
    thousands = (np.arange(len(block_ms)) + 0.5) * BLOCK_STEPS / 1000
    (value, _), covariance = np.polyfit(thousands, block_ms, 1, cov=True)
    return {"value": round(float(value), 4), "standard_error": round(float(np.sqrt(covariance[0, 0])), 4)}


if __name__ == "__main__":
    sys.exit(main())
