"""One token by recomputing the window against one token by a full ring: StreamingLLM's Figure 10, in small.

Recomputation feeds all S + W tokens to an empty cache for each new token, in the runtime's own prefill; streaming is one decode step. The
two are timed in turns, so that whatever else the machine does slows both, and medians are compared.
"""

import sys
import time
from pathlib import Path

import numpy as np
from results import new_figure, options, save_figure, say, write_csv, write_json
from sinkring.exporter.bundle_cache import cached_bundle
from sinkring.runtime import open_bundle

SINKS = 4


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--caches", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096], help="tokens, S + W")
    parser.add_argument("--rounds", type=int, default=5, help="each of one recomputation and some steps (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="a round (%(default)s)")
    args = parser.parse_args()
    rows = []
    for cache in args.caches:
        bundle = cached_bundle(args.bundles, args.model, policy="streaming", sinks=SINKS, window=cache - SINKS)
        recompute, stream = timed(bundle, cache, args.rounds, args.steps, args.threads)
        rows.append((cache, *recompute, *stream, recompute[1] / stream[1]))
        say(f"cache {cache}: {recompute[1]:.0f} ms recomputed, {stream[1]:.1f} ms streamed", len(rows), len(args.caches))
    quartiles = ("p25", "median", "p75")
    headings = ("cache", *(f"{way}_ms_{part}" for way in ("recompute", "streaming") for part in quartiles), "ratio_of_medians")
    write_csv(args, "latency", headings, rows)
    write_json(args, "latency", {"rows": [dict(zip(headings, row, strict=True)) for row in rows]})
    figure, axes = new_figure(f"{args.model} in ONNX Runtime, {args.threads} threads", "cache S + W, tokens", "ms a token")
    for name, place in (("recomputation", 1), ("streaming", 4)):
        low, middle, high = ([row[place + part] for row in rows] for part in range(3))
        (line,) = axes.plot(args.caches, middle, marker="o", label=name)
        axes.fill_between(args.caches, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(args.caches, [str(cache) for cache in args.caches])
    axes.legend()
    save_figure(args, "latency", figure)
    for row in rows:
        print(f"{row[0]}: recomputation {row[2]:.0f} ms, streaming {row[5]:.1f} ms, ratio {row[7]:.1f}")
    return 0


def timed(bundle: Path, cache: int, rounds: int, steps: int, threads: int) -> tuple[list[float], list[float]]:
    """Quartiles in ms of a recomputed token and of a streamed one, at a full ring."""
    rng = np.random.default_rng(0)
    recomputed, streamed = [], []
    # Two decoders: a recomputation empties its cache.
    with open_bundle(bundle, threads=threads) as decoder, open_bundle(bundle, threads=threads, verify=False) as other:
        vocab = decoder.manifest.model.vocab_size
        stream, fresh = decoder.stream(), other.stream()
        stream.feed(rng.integers(0, vocab, decoder.manifest.rings[0].geometry.capacity + 1))
        fresh.feed(rng.integers(0, vocab, decoder.manifest.chunk))
        stream.feed([1])
        for _ in range(rounds):
            window = rng.integers(0, vocab, cache)
            fresh.reset()
            began = time.perf_counter()
            fresh.feed(window)
            recomputed.append((time.perf_counter() - began) * 1e3)
            for token in rng.integers(0, vocab, steps):
                began = time.perf_counter()
                stream.feed([int(token)])
                streamed.append((time.perf_counter() - began) * 1e3)
    return tuple(np.percentile(times, [25, 50, 75]).tolist() for times in (recomputed, streamed))  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(main())
