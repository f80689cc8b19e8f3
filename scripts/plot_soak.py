"""The curves of a long run (`scripts/soak`), and whether they are flat: least squares over the blocks, each slope with its own error.

Reads OUT/blocks.csv and writes NAME.csv, NAME.png and NAME.json into the folder of results. The loss itself follows the text, and the
speed whatever else the machine does: whether the stream ages is told by the difference to the young stream, fed the same pieces in turns.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure
from sinkring.exporter.machine import describe_machine
from soak import CSV_NAME, Block, read_rows

ROOT = Path(__file__).resolve().parents[1]
# Until allocators and caches are warm: each process starts anew.
WARM_BLOCKS = 3

# Name, what it is, and which figure of a block; the slopes are per million tokens.
CURVES: dict[str, tuple[str, Callable[[Block], float]]] = {
    "loss": ("log-perplexity, nats a token", lambda row: row.loss),
    "loss_over_young": ("log-perplexity, old stream minus young, nats", lambda row: row.old_loss - row.young_loss),
    "time_over_young": ("time, old stream over young", lambda row: row.old_seconds / row.young_seconds),
    "largest_score": ("largest attention score", lambda row: row.largest_score),
    "typical_score": ("largest attention score of a head, averaged", lambda row: row.typical_score),
    "sink_share": ("share of attention on the sinks", lambda row: row.sink_share),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of a run")
    parser.add_argument("--name", default="soak", help="of the files (%(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="(%(default)s)")
    args = parser.parse_args()
    rows = read_rows(args.out / CSV_NAME)
    if len(rows) < 2 * WARM_BLOCKS:
        print(f"plot_soak: {args.out} has {len(rows)} blocks, {2 * WARM_BLOCKS} are needed; let the run go on", file=sys.stderr)
        return 2
    args.results.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(args.out / CSV_NAME, args.results / f"{args.name}.csv")
    found = summarize(rows)
    (args.results / f"{args.name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(rows, args.name).savefig(args.results / f"{args.name}.png", dpi=110)
    print(json.dumps(found, indent=1))
    return 0


def summarize(rows: Sequence[Block]) -> dict:
    return {
        "tokens": rows[-1].tokens,
        "blocks": len(rows),
        "processes": max(row.run for row in rows),
        "log_perplexity": float(np.mean([row.loss for row in rows])),
        "tokens_per_second_median": float(np.median([row.tokens_per_second for row in rows])),
        "cache_bytes": sorted({row.cache_bytes for row in rows}),
        "moved_addresses": sum(row.moved_addresses for row in rows),
        "memory": [memory_growth(rows, run) for run in sorted({row.run for row in rows})],
        "slopes_per_million_tokens": {name: slope(rows, figure) for name, (_, figure) in CURVES.items()},
        "machine": dataclasses.asdict(describe_machine()),
        "versions": {package: version(package) for package in ("onnxruntime", "numpy")},
    }


def slope(rows: Sequence[Block], figure: Callable[[Block], float]) -> dict[str, float | bool]:
    """Least squares with its standard error; flat if zero is within two of them."""
    points = [(row.tokens / 1e6, figure(row)) for row in rows if np.isfinite(figure(row))]
    x, y = np.array(points).T
    (value, _), covariance = np.polyfit(x, y, 1, cov=True)
    error = float(np.sqrt(covariance[0, 0]))
    return {
        "mean": float(y.mean()),
        "median": float(np.median(y)),
        "slope": float(value),
        "standard_error": error,
        "flat": abs(float(value)) <= 2 * error,
    }


def memory_growth(rows: Sequence[Block], run: int) -> dict[str, int]:
    """Bytes that one process gained from its WARM_BLOCKS-th block to its last."""
    own = [row for row in rows if row.run == run]
    first, last = own[min(WARM_BLOCKS, len(own)) - 1], own[-1]
    return {
        "process": run,
        "tokens": last.tokens - first.tokens,
        "resident_growth_bytes": last.resident_bytes - first.resident_bytes,
        "anonymous_growth_bytes": last.anonymous_bytes - first.anonymous_bytes,
    }


def draw(rows: Sequence[Block], title: str) -> Figure:
    figure = Figure(figsize=(9, 9), layout="constrained")
    loss, over, speed, memory, attention = figure.subplots(5, sharex=True)
    tokens = [row.tokens for row in rows]

    def plot(axes, name: str, color: str = "C0") -> None:
        label, value = CURVES[name]
        axes.plot(tokens, [value(row) for row in rows], ".-", color=color, linewidth=0.8, markersize=3)
        axes.set_ylabel(fill(label, 24), fontsize=7)

    figure.suptitle(f"{title}: {rows[-1].tokens:,} tokens")
    plot(loss, "loss")
    plot(over, "loss_over_young")
    over.axhline(0, color="grey", linewidth=0.6)
    plot(speed, "time_over_young")
    speed.axhline(1, color="grey", linewidth=0.6)
    # A machine that stops the process for a while must not flatten the rest of the curve.
    speed.set_ylim(0, 2)
    memory.plot(tokens, [row.resident_bytes / 1e6 for row in rows], label="resident, weights mapped twice included", linewidth=1)
    memory.plot(tokens, [row.anonymous_bytes / 1e6 for row in rows], label="anonymous", linewidth=1)
    memory.plot(tokens, [row.cache_bytes / 1e6 for row in rows], label="cache", linewidth=1)
    memory.set_ylabel("MB", fontsize=7)
    memory.set_ylim(bottom=0)
    memory.legend(fontsize=7)
    plot(attention, "largest_score")
    share = attention.twinx()
    plot(share, "sink_share", "C1")
    share.set_ylim(0, 1)
    attention.set_xlabel("position, tokens")
    return figure


if __name__ == "__main__":
    sys.exit(main())
