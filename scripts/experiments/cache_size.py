"""Does a larger cache help? StreamingLLM's Table 6, in small: 4 sinks and caches of several sizes, all scored on the same tokens."""

import sys

import numpy as np
from results import new_figure, options, save_figure, say, write_csv, write_json
from sinkring.exporter import measure_perplexity

SINKS = 4


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--text", default="topics", help="(%(default)s)")
    parser.add_argument("--caches", type=int, nargs="+", default=[256, 512, 1024, 2048], help="tokens, S + W")
    parser.add_argument("--starts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=2560, help="of each start (%(default)s)")
    args = parser.parse_args()
    losses = {
        cache: measure_perplexity(
            args.model,
            args.text,
            policies=["streaming"],
            sinks=SINKS,
            window=cache - SINKS,
            starts=args.starts,
            tokens=args.tokens,
            bundles=args.bundles,
            threads=args.threads,
            progress=say,
        ).losses["streaming"]
        for cache in args.caches
    }
    # Once the largest is full, so that each has the same tokens to predict.
    first = max(args.caches) - 1
    largest = losses[max(args.caches)][:, first:].mean(axis=1)
    rows = []
    for cache, values in losses.items():
        own = values[:, first:].mean(axis=1)
        over = own - largest
        errors = [float(row.std(ddof=1) / np.sqrt(len(row))) if len(row) > 1 else float("nan") for row in (own, over)]
        rows.append((cache, float(np.exp(own.mean())), float(own.mean()), errors[0], float(np.exp(over.mean())), errors[1]))
    headings = ("cache", "perplexity", "log_perplexity_nats", "standard_error_nats", "over_largest", "standard_error_of_log_ratio")
    write_csv(args, "cache-size", headings, rows)
    write_json(args, "cache-size", {"first_scored": first, "rows": [dict(zip(headings, row, strict=True)) for row in rows]})
    figure, axes = new_figure(f"{args.model}, {args.text}, S = {SINKS}", "cache S + W, tokens", "perplexity / that of the largest cache")
    axes.errorbar([row[0] for row in rows], [row[4] for row in rows], yerr=[row[4] * row[5] for row in rows], marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(args.caches, [str(cache) for cache in args.caches])
    save_figure(args, "cache-size", figure)
    for row in rows:
        print(f"{row[0]}: perplexity {row[1]:.2f}, over the largest {row[4]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
