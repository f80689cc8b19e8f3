"""`sinkring`: the entry point. Light, so that it can say what is missing; the commands are declared in `cli_commands` and `cli_figures`."""

import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sinkring.exporter.cli_faults import USER_ERROR, one_line_faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` default to those of the process. Returns the exit status.

    0: done. 1: a validation that failed. 2: an error the user can mend, on one line of stderr. 130: interrupted.
    """
    _open_closed_streams()
    # Looked for, not imported: rich is slow to load and `--help` does without.
    if not all(map(find_spec, ("typer", "rich"))):
        print("error: the command line needs typer and rich: pip install 'sinkring[cli]'", file=sys.stderr)
        return USER_ERROR
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale that lacks a character must not end a stream.
        sys.stdout.reconfigure(errors="replace")
    try:
        with one_line_faults():
            from sinkring.exporter import cli_commands, cli_figures  # noqa: F401 - declare their commands
            from sinkring.exporter.cli_app import app

            app(arguments, prog_name="sinkring")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _open_closed_streams() -> None:
    """A shell's `>&-` leaves None, which neither prints nor flushes: such a stream reads and writes nothing.

    In the order of their descriptors, so that each takes back its own: else the next file to be opened would be the program's output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 open for good


if __name__ == "__main__":
    sys.exit(main())
