"""Dense, window, recomputation and sinks over the same text: StreamingLLM's Figure 3 and Table 1, in small.

Two runs: several starts inside the trained context, which give means with standard errors and decide the claims below (exit status 1 if
one fails), and one long text far beyond the trained context.
"""

import sys

from results import new_figure, options, save_figure, say, write_csv, write_json
from sinkring.exporter import measure_perplexity
from sinkring.exporter.perplexity import Perplexity
from sinkring.exporter.perplexity_files import draw_curves

WITHIN = ("dense", "window", "recompute", "streaming", "native", "oracle")
BEYOND = ("dense", "window", "recompute", "streaming")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--text", default="topics", help="of the several starts (%(default)s)")
    parser.add_argument("--long-text", default="kjv", help="of the long one (%(default)s)")
    parser.add_argument("--starts", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=768, help="of each start (%(default)s)")
    parser.add_argument("--long-tokens", type=int, default=20_480, help="of the long text; 0 leaves it out (%(default)s)")
    args = parser.parse_args()
    setup = {"sinks": 4, "window": 252, "bundles": args.bundles, "threads": args.threads, "progress": say}
    found = measure_perplexity(args.model, args.text, policies=WITHIN, starts=args.starts, tokens=args.tokens, recompute_every=128, **setup)
    claims = judge(found)
    write_json(args, "policies", {**found.to_dict(), "claims": claims})
    draw_curves(found, args.results / "policies.png", bins=20)
    if args.long_tokens:
        long = measure_perplexity(
            args.model, args.long_text, policies=BEYOND, starts=1, tokens=args.long_tokens, recompute_every=32, **setup
        )
        write_json(args, "policies-long", long.to_dict())
        # Of one token in 32: fewer bins, so that each has enough of them.
        curves = {policy: long.curve(policy, bins=10 if policy == "recompute" else 40) for policy in BEYOND}
        rows = [(policy, start, stop, mean) for policy, curve in curves.items() for start, stop, mean, _ in curve]
        write_csv(args, "policies-long", ("policy", "from_position", "to_position", "log_perplexity_nats"), rows)
        draw_long(args, long, curves)
    for claim in claims:
        print(f"{'holds' if claim['holds'] else 'FAILS'}: {claim['claim']}: {claim['found']:.4f} ± {claim['standard_error']:.4f}")
    return 0 if all(claim["holds"] for claim in claims) else 1


def judge(found: Perplexity) -> list[dict]:
    """What must show: the window alone collapses, sinks stay near the dense model, and are the literal StreamingLLM."""
    rows = []
    for policy, other, claim, test in (
        ("window", "streaming", "perplexity without sinks over that with sinks > 1.5", lambda ratio: ratio > 1.5),
        ("streaming", "dense", "perplexity with sinks over dense < 1.25", lambda ratio: ratio < 1.25),
        ("streaming", "oracle", "perplexity with sinks within 2 % of the literal StreamingLLM", lambda ratio: abs(ratio - 1) < 0.02),
    ):
        ratio = found.compare(policy, other)
        rows.append({"claim": claim, "found": ratio.factor, "standard_error": ratio.factor_error, "holds": bool(test(ratio.factor))})
    return rows


def draw_long(args, long: Perplexity, curves: dict) -> None:
    figure, axes = new_figure(
        f"{args.model}, {args.long_text}, S={long.sinks} W={long.window}", "position in the text, tokens", "log-perplexity, nats a token"
    )
    for policy, rows in curves.items():
        places = [(start + stop) / 2 for start, stop, _, _ in rows]
        axes.plot(places, [row[2] for row in rows], label=policy, linewidth=1.4, linestyle="--" if policy == "recompute" else "-")
    axes.axvline(8192, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate(" trained context", (8192, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color="grey")
    axes.legend()
    save_figure(args, "policies-long", figure)


if __name__ == "__main__":
    sys.exit(main())
