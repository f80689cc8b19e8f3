"""How many sinks does a model need? StreamingLLM's Table 2, in small: caches of one size with 0, 1, 2, 4 and 8 sinks."""

import sys

import numpy as np
from results import new_figure, options, save_figure, say, write_csv, write_json
from sinkring.exporter import measure_perplexity

SINKS = (0, 1, 2, 4, 8)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--text", default="topics", help="(%(default)s)")
    parser.add_argument("--cache", type=int, default=256, help="tokens, S + W (%(default)s)")
    parser.add_argument("--starts", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=768, help="of each start (%(default)s)")
    args = parser.parse_args()
    found = {
        sinks: measure_perplexity(
            args.model,
            args.text,
            policies=["streaming"],
            sinks=sinks,
            window=args.cache - sinks,
            starts=args.starts,
            tokens=args.tokens,
            bundles=args.bundles,
            threads=args.threads,
            progress=say,
        )
        for sinks in SINKS
    }
    # The same tokens under each: their differences have none of the text's own spread.
    reference = found[4].losses["streaming"]
    rows = []
    for sinks, one in found.items():
        own = one.estimate("streaming")
        over = (one.losses["streaming"] - reference)[:, one.first_scored :].mean(axis=1)
        error = float(over.std(ddof=1) / np.sqrt(len(over))) if len(over) > 1 else float("nan")
        rows.append((sinks, args.cache - sinks, own.factor, own.nats, own.standard_error, float(np.exp(over.mean())), error))
    headings = (
        "sinks",
        "window",
        "perplexity",
        "log_perplexity_nats",
        "standard_error_nats",
        "over_4_sinks",
        "standard_error_of_log_ratio",
    )
    write_csv(args, "sinks", headings, rows)
    write_json(args, "sinks", {"rows": [dict(zip(headings, row, strict=True)) for row in rows]})
    figure, axes = new_figure(f"{args.model}, {args.text}, S + W = {args.cache}", "sinks S", "perplexity / that with 4 sinks")
    axes.errorbar(range(len(rows)), [row[5] for row in rows], yerr=[row[5] * row[6] for row in rows], marker="o", capsize=3)
    axes.set_xticks(range(len(rows)), [str(row[0]) for row in rows])
    save_figure(args, "sinks", figure)
    for row in rows:
        print(f"{row[0]}+{row[1]}: perplexity {row[2]:.2f}, over 4 sinks {row[5]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
