"""Where a command's words go: its result to stdout, a table for people or one JSON object for programs; everything else to stderr."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# Columns for a table that goes to a file or a pipe: wide enough that no cell is cut.
_PIPE_COLUMNS = 240


def print_json(result: Mapping[str, Any]) -> None:
    """One line, in ASCII, so that no locale can spoil it."""
    print(json.dumps(result))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """A table on stdout; numbers to the right, with separators between thousands."""
    from rich.text import Text

    table = _table(title, with_headings=True)
    for index, heading in enumerate(headings):
        numbers = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    _print(table)


def print_facts(facts: Mapping[str, object], title: str | None = None) -> None:
    """Names and values on stdout, one a line."""
    from rich.text import Text

    table = _table(title, with_headings=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name), Text(_cell(value)))
    _print(table)


def note(line: str) -> None:
    """A remark on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def stage_status() -> Iterator[Callable[[str], None]]:
    """A callback that takes a line at the start of each stage: a spinner on a terminal, plain lines elsewhere; all on stderr."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield note
        return
    with console.status("") as status:
        yield lambda line: status.update(Text(line))


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A callback that takes (phase, steps done, steps in all): a bar for each phase under way on a terminal, all on stderr.

    Elsewhere a line for each new job, which is what a phase is named by before its colon.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        jobs: set[str] = set()

        def say(phase: str, done: int, steps: int) -> None:
            job = phase.partition(":")[0]
            if job not in jobs:
                jobs.add(job)
                note(job)

        yield say
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def show(phase: str, done: int, steps: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=steps or None)
            progress.update(bars[phase], completed=done, total=steps or None)
            if steps and done >= steps:
                progress.remove_task(bars.pop(phase))

        yield show


def _table(title: str | None, with_headings: bool) -> "Table":
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        show_header=with_headings,
    )


def _print(table: "Table") -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(table)
        return
    console = Console(highlight=False, width=_PIPE_COLUMNS)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)
