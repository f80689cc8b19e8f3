"""Streaming perplexity under several geometries on the same tokens, each against one of them: what Tables 2 and 6 have in common."""

import argparse
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from results import new_figure, save_figure, say, write_csv, write_json
from sinkring.exporter import measure_perplexity


@dataclass(frozen=True)
class Row:
    """One geometry. Means over the starts; over_reference: perplexity over that of the reference on the same tokens, whose error has
    none of the text's own spread.
    """

    sinks: int
    window: int
    perplexity: float
    log_perplexity_nats: float
    standard_error_nats: float
    over_reference: float
    standard_error_of_log_ratio: float


def measure(args: argparse.Namespace, geometries: Sequence[tuple[int, int]], reference: tuple[int, int]) -> list[Row]:
    """geometries: (S, W). Scored are the tokens that come once the largest cache is full."""
    losses = {
        (sinks, window): measure_perplexity(
            args.model,
            args.text,
            policies=["streaming"],
            sinks=sinks,
            window=window,
            starts=args.starts,
            tokens=args.tokens,
            bundles=args.bundles,
            threads=args.threads,
            progress=say,
        ).losses["streaming"]
        for sinks, window in geometries
    }
    first = max(sinks + window for sinks, window in geometries) - 1
    means = {geometry: values[:, first:].mean(axis=1) for geometry, values in losses.items()}
    rows = []
    for geometry, own in means.items():
        over = own - means[reference]
        errors = [float(part.std(ddof=1) / np.sqrt(len(part))) if len(part) > 1 else float("nan") for part in (own, over)]
        rows.append(Row(*geometry, float(np.exp(own.mean())), float(own.mean()), errors[0], float(np.exp(over.mean())), errors[1]))
    return rows


def show(args: argparse.Namespace, name: str, rows: Sequence[Row], title: str, x: str, places: Sequence[int], reference: str) -> None:
    """Write NAME.csv, .json and .png, the ratios evenly spaced over `places`, and print the table."""
    write_csv(args, name, [field.name for field in fields(Row)], [astuple(row) for row in rows])
    write_json(args, name, {"rows": [{field.name: getattr(row, field.name) for field in fields(Row)} for row in rows]})
    figure, axes = new_figure(f"{args.model}, {args.text}, {title}", x, f"perplexity / that with {reference}")
    ratios = np.array([(row.over_reference, row.over_reference * row.standard_error_of_log_ratio) for row in rows])
    axes.errorbar(range(len(rows)), ratios[:, 0], yerr=ratios[:, 1], marker="o", capsize=3)
    axes.set_xticks(range(len(rows)), [str(place) for place in places])
    save_figure(args, name, figure)
    for row in rows:
        print(f"{row.sinks}+{row.window}: perplexity {row.perplexity:.2f}, {row.over_reference:.3f} times that with {reference}")
