"""A step at position a million beside one at a full ring's first turn, in one process, in turns and in either order.

Prints, for each bundle, both in ms and the ratio of the two within a round: medians, the middle half in brackets.
"""

import sys
from pathlib import Path

import numpy as np
from rich.table import Table
from sinkring.exporter.bench.session import OLDEST, BenchSession
from turns import quartiles, run_for_bundles, show

STEPS = 10
# Of each turn: what was moved to place the stream is in the caches, and the weights are not.
UNTIMED = 2


def tabulate(found: dict[str, dict[str, list[float]]]) -> Table:
    table = Table("bundle", "at C, ms", f"at {OLDEST:,}, ms", "ratio")
    for bundle, result in found.items():
        table.add_row(bundle, show(result["young_ms"], 2), show(result["old_ms"], 2), show(result["ratio"], 3))
    return table


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
    return {"young_ms": quartiles(young), "old_ms": quartiles(old), "ratio": quartiles(old / young)}


if __name__ == "__main__":
    sys.exit(run_for_bundles(__doc__, 32, measure, tabulate))
