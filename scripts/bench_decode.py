"""Decode at a full ring against the time that reading weights and cache once takes at this machine's memory bandwidth.

The two are measured in turns, A B A B, so that a noisy machine slows both; medians with the middle half of the samples are printed.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from sinkring.exporter.angles import DIGIT_BITS, DIGITS
from sinkring.exporter.export import export_decoder
from sinkring.exporter.machine import describe_machine
from sinkring.runtime import Decoder, open_bundle

ROOT = Path(__file__).resolve().parents[1]
# Many times the last-level cache of today's servers.
BANDWIDTH_BUFFER_BYTES = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=1024, help="tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of one bandwidth sample and some decode steps (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="decode steps a round (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--target", default="onnxruntime", help="which decode graph (%(default)s)")
    args = parser.parse_args()
    bundle = ROOT / "bundles" / f"bench-window{args.window}"
    if not bundle.exists():
        export_decoder("smollm2", bundle, window=args.window, progress=lambda line: print(line, file=sys.stderr))
    torch.set_num_threads(args.threads)
    buffer = torch.ones(BANDWIDTH_BUFFER_BYTES // 4)
    with open_bundle(bundle, target=args.target, threads=args.threads) as decoder:
        read_bytes = weight_bytes_read(decoder) + decoder.cache_bytes
        stream = decoder.stream()
        rng = np.random.default_rng(0)
        vocab = decoder.manifest.model.vocab_size
        stream.feed(rng.integers(0, vocab, decoder.manifest.rings[0].geometry.capacity + 1))
        bandwidths, steps_ms = [], []
        for _ in range(args.rounds):
            began = time.perf_counter()
            buffer.sum()
            bandwidths.append(BANDWIDTH_BUFFER_BYTES / (time.perf_counter() - began))
            for token in rng.integers(0, vocab, args.steps):
                began = time.perf_counter()
                stream.feed([int(token)])
                steps_ms.append((time.perf_counter() - began) * 1e3)
    floor_ms = read_bytes / np.median(bandwidths) * 1e3
    step_ms = float(np.median(steps_ms))
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "versions": {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__},
        "target": args.target,
        "window_tokens": args.window,
        "threads": args.threads,
        "read_bytes_per_token": read_bytes,
        "bandwidth_gb_s": spread(np.array(bandwidths) / 1e9),
        "floor_ms": round(floor_ms, 2),
        "step_ms": spread(np.array(steps_ms)),
        "ratio": round(step_ms / floor_ms, 3),
    }
    print(json.dumps(result, indent=2))
    return 0


def weight_bytes_read(decoder: Decoder) -> int:
    """Weights that one step reads: all of the file but the angle tables (rows of which are looked up). A tied head counts once."""
    model = decoder.manifest.model
    return model.weight_bytes - DIGITS * (1 << DIGIT_BITS) * model.head_size * 4


def spread(samples: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(samples, [25, 50, 75])
    return {"median": round(float(median), 2), "p25": round(float(low), 2), "p75": round(float(high), 2)}


if __name__ == "__main__":
    sys.exit(main())
