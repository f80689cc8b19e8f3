"""A step at position a million beside one at a full ring's first turn, in one process, in turns and in either order.

Prints, for each bundle, medians in ms and the ratio of the two within a round: its median and the middle half.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sinkring.exporter.bench.session import OLDEST, BenchSession
from sinkring.runtime import SinkringError

STEPS = 10
# Of each turn: what was moved to place the stream is in the caches, and the weights are not.
UNTIMED = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    args = parser.parse_args()
    try:
        found = {str(bundle): measure(bundle, args.rounds, args.threads) for bundle in args.bundles}
    except SinkringError as error:
        parser.error(str(error))
    table = Table("bundle", "at C, ms", f"at {OLDEST:,}, ms", "ratio")
    for bundle, result in found.items():
        low, middle, high = result["ratio"]
        young, old = (f"{result[name][1]:.2f}" for name in ("young_ms", "old_ms"))
        table.add_row(bundle, young, old, f"{middle:.3f} ({low:.3f} .. {high:.3f})")
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(bundle: Path, rounds: int, threads: int) -> dict[str, list[float]]:
    """young_ms, old_ms: of a round's median step; ratio: old to young within a round. Each in quartiles."""
    session = BenchSession(bundle, "onnxruntime", None, {"threads": threads})
    turns = []
    for round_ in range(rounds):
        order = (session.full, OLDEST) if round_ % 2 else (OLDEST, session.full)
        times = {position: float(np.median(session.time_steps(position, STEPS)[UNTIMED:])) for position in order}
        turns.append((times[session.full], times[OLDEST]))
    session.decoder.close()
    young, old = np.array(turns).T
    return {
        name: np.percentile(values, [25, 50, 75]).tolist()
        for name, values in (("young_ms", young), ("old_ms", old), ("ratio", old / young))
    }


if __name__ == "__main__":
    sys.exit(main())
