"""The plans of bundles for all GPUs that TensorRT-RTX compiles for: one table, in the terminal and in docs/results/NAME.md and .json.

`scripts/plan_table.py BUNDLE... --name NAME`; no GPU is needed. Exit status 0: a row that was refused is part of the answer.
"""

import argparse
import dataclasses
import json
from importlib.metadata import version
from pathlib import Path

from sinkring.exporter.cli_output import note, print_table
from sinkring.exporter.engine_builder import load_builder, supported_sms
from sinkring.exporter.family_table import markdown_table
from sinkring.exporter.plan_table import PlanRow, plan_rows

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--sm", type=int, nargs="+", help="(all that the builder knows)")
    parser.add_argument("--name", help="of the files in docs/results; none are written without it")
    args = parser.parse_args()
    sms = args.sm or supported_sms(load_builder("tensorrt-rtx"))
    rows: list[PlanRow] = []
    for bundle in args.bundles:
        rows += plan_rows(bundle, sms, progress=lambda what, done, total: note(f"{what}: {done + 1} of {total}"))
    headings = [field.name.replace("_", " ") for field in dataclasses.fields(PlanRow)]
    cells = [["" if cell is None else str(cell) for cell in dataclasses.astuple(row)] for row in rows]
    print_table(headings, cells)
    if args.name:
        builder = f"TensorRT-RTX {version('tensorrt-rtx-cu13')}"
        results = ROOT / "docs" / "results"
        content = {"builder": builder, "rows": [dataclasses.asdict(row) for row in rows]}
        (results / f"{args.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        table = f"`scripts/plan_table.py`, {builder}\n\n{markdown_table(headings, cells)}"
        (results / f"{args.name}.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
