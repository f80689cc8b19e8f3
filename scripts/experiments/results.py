"""Where the experiments leave what they found: docs/results/NAME.json, .csv and .png, the first with machine, versions and command."""

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sinkring.exporter.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("onnxruntime", "torch", "transformers", "numpy")


def options(description: str | None) -> argparse.ArgumentParser:
    """What all experiments take; each adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(%(default)s)")
    parser.add_argument(
        "--bundles", type=Path, default=ROOT / "bundles" / "experiments", help="folder where bundles are kept (%(default)s)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    return parser


def say(stage: str, done: int, total: int) -> None:
    print(f"{stage} {done}/{total}", file=sys.stderr, flush=True)


def write_json(args: argparse.Namespace, name: str, found: dict[str, Any]) -> None:
    settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
    about = {
        "settings": settings,
        "machine": dataclasses.asdict(describe_machine()),
        "versions": {package: version(package) for package in PACKAGES},
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{name}.json").write_text(json.dumps({**found, **about}, indent=1) + "\n", encoding="utf-8")


def write_csv(args: argparse.Namespace, name: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    args.results.mkdir(parents=True, exist_ok=True)
    with (args.results / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(headings)
        writer.writerows([f"{cell:.5g}" if isinstance(cell, float) else cell for cell in row] for row in rows)


def new_figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25, linewidth=0.5)
    return figure, axes


def save_figure(args: argparse.Namespace, name: str, figure: Figure) -> None:
    args.results.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.results / f"{name}.png", dpi=110)
