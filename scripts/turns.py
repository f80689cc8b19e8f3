"""What the scripts share that measure bundles in turns: their arguments, quartiles, a table and a JSON file."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table
from sinkring.runtime import SinkringError

Found = TypeVar("Found")


def run_for_bundles(
    description: str | None, rounds: int, measure: Callable[[Path, int, int], Found], tabulate: Callable[[dict[str, Found]], Table]
) -> int:
    """The whole of such a script. measure: called for each bundle with the rounds and threads asked for. The status for the shell."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", help="of one row")
    parser.add_argument("--rounds", type=int, default=rounds, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    args = parser.parse_args()
    try:
        found = {str(bundle): measure(bundle, args.rounds, args.threads) for bundle in args.bundles}
    except SinkringError as error:
        parser.error(str(error))
    Console().print(tabulate(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def quartiles(values: ArrayLike) -> list[float]:
    return [float(value) for value in np.percentile(values, (25, 50, 75))]


def show(values: list[float], digits: int) -> str:
    low, middle, high = (f"{value:,.{digits}f}" for value in values)
    return f"{middle} ({low} .. {high})"
