"""One line at the foot of the terminal that changes while text scrolls above it.

The text goes to stdout and the line to stderr, and both may be the same screen: so the last row is taken out of the scrolling region
(DECSTBM), as package managers do for their progress bars, and the cursor is saved and restored (DECSC, DECRC) around each change.
"""

import os
import sys
import time
from collections.abc import Callable

_PERIOD_SECONDS = 0.1


def has_terminal() -> bool:
    """Whether stderr is a terminal on which the line can be drawn."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class LiveLine:
    """A context manager. Does nothing where stderr is no terminal, or one that knows no such sequences."""

    def __init__(self) -> None:
        self._on = has_terminal()
        self._rows = 0
        self._next = 0.0

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._rows = 0

    def show(self, line: Callable[[], str]) -> None:
        """Put up `line()`, at most ten times a second: it is not called in between."""
        now = time.monotonic()
        if not self._on or now < self._next:
            return
        self._next = now + _PERIOD_SECONDS
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
        if rows < 3:
            return
        if rows != self._rows:
            # One row down (IND, which keeps the column) and up again makes room if the cursor stands on the row that is taken away.
            self._write(f"\x1bD\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8")
            self._rows = rows
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[7m{line()[:columns]}\x1b[0m\x1b8")

    def _write(self, sequence: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(sequence)
        sys.stderr.flush()
