"""Does anything grow? Decode at a full ring for thousands of steps and watch addresses, memory and time.

Prints one JSON object: cache addresses equal, resident and anonymous bytes before and after, and the slope of the step time with its
standard error. A flat stream has a slope that is within its own error of zero.
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
from sinkring.runtime import open_bundle

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=ROOT / "bundles" / "smollm2", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=5000, help="after the ring is full (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    args = parser.parse_args()
    with open_bundle(args.bundle, threads=args.threads) as decoder:
        manifest = decoder.manifest
        stream = decoder.stream()
        rng = np.random.default_rng(0)
        capacity = max(ring.geometry.capacity for ring in manifest.rings)
        tokens = rng.integers(0, manifest.model.vocab_size, capacity + 50 + args.steps)
        stream.feed(tokens[:capacity])
        for token in tokens[capacity : capacity + 50]:
            stream.feed([token])
        addresses, before = decoder.backend.addresses(), memory_bytes()
        steps_ms = np.zeros(args.steps)
        for index, token in enumerate(tokens[capacity + 50 :]):
            began = time.perf_counter()
            stream.feed([token])
            steps_ms[index] = (time.perf_counter() - began) * 1e3
        after = memory_bytes()
        result = {
            "machine": dataclasses.asdict(describe_machine()),
            "versions": {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__},
            "bundle": args.bundle.name,
            "capacity_slots": capacity,
            "steps": args.steps,
            "position": stream.position,
            "cache_bytes": decoder.cache_bytes,
            "addresses_unchanged": addresses == decoder.backend.addresses(),
            "memory_before_bytes": before,
            "memory_after_bytes": after,
            "resident_growth_bytes": after["VmRSS"] - before["VmRSS"],
            "anonymous_growth_bytes": after["RssAnon"] - before["RssAnon"],
            "step_ms": {name: round(float(value), 3) for name, value in zip(("p25", "median", "p75"), quartiles(steps_ms), strict=True)},
            "slope_ms_per_1000_steps": slope(steps_ms),
        }
    print(json.dumps(result, indent=2))
    return 0


def memory_bytes() -> dict[str, int]:
    """VmRSS and its anonymous part; the rest is pages of mapped files, which the system can drop at any time."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}


def quartiles(samples: np.ndarray) -> list[float]:
    return np.percentile(samples, [25, 50, 75]).tolist()


def slope(samples_ms: np.ndarray, blocks: int = 50) -> dict[str, float]:
    """Least squares over medians of blocks, so that single slow steps of a busy machine do not decide it; with its standard error."""
    medians = np.array([np.median(block) for block in np.array_split(samples_ms, blocks)])
    x = (np.arange(blocks) + 0.5) * len(samples_ms) / blocks / 1000
    (value, _), covariance = np.polyfit(x, medians, 1, cov=True)
    return {"value": round(float(value), 4), "standard_error": round(float(np.sqrt(covariance[0, 0])), 4)}


if __name__ == "__main__":
    sys.exit(main())
