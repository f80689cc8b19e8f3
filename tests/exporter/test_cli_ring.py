"""The ring as a line: drawn by hand, and as wide as it may be."""

import contextlib
import fcntl
import os
import pty
import struct
import termios
from pathlib import Path

import pytest
from sinkring.exporter.cli_ring import ring_line
from sinkring.runtime import RingGeometry

from tests.exporter.invoke_cli import invoke, spawn

# S = 2, W = 3, M = 5, so C = 7: two slots hold what is out of the window and not yet overwritten.
RING = RingGeometry(2, 3, 5)


@pytest.mark.parametrize(
    ("tokens", "drawn"),
    [
        (0, "ring empty"),
        (1, "[S     ] token 0, window from 0"),
        (4, "[SS▒█   ] token 3, window from 1"),
        (5, "[SS░▒█  ] token 4, window from 2"),
        (7, "[SS··░▒█] token 6, window from 4"),
        (8, "[SS█··░▒] token 7, window from 5, wrapped 1 times"),
        (14, "[SS▒█··░] token 13, window from 11, wrapped 2 times"),
    ],
)
def test_the_line_is_the_ring(tokens: int, drawn: str) -> None:
    assert ring_line(RING, tokens, 120) == drawn


@pytest.mark.parametrize(
    "geometry", [RING, RingGeometry(4, 256, 324), RingGeometry(0, 5, 8), RingGeometry.linear(4096), RingGeometry(64, 8, 16)]
)
@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("tokens", [1, 3, 300, 4000])
def test_it_fits_and_has_one_head(geometry: RingGeometry, columns: int, tokens: int) -> None:
    line = ring_line(geometry, tokens, columns)
    assert len(line) <= max(columns, 64), "a narrow terminal cuts the words, not the ring"
    assert line.index("]") < columns
    assert line.count("█") == (tokens > geometry.sinks_tokens)


def test_watching_needs_a_terminal(speaking_bundle: Path) -> None:
    ended = invoke("run", speaking_bundle, "--prompt", "a", "--tokens", 3, "--watch")
    assert ended.status == 2
    (line,) = ended.errors
    assert "--watch" in line
    assert "terminal" in line


def test_a_terminal_shows_the_ring_while_text_is_written(speaking_bundle: Path) -> None:
    """With a pseudo-terminal as stderr."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    running = spawn("run", speaking_bundle, "--prompt", "a", "--tokens", 40, "--watch", stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed when the command has ended
        while piece := os.read(ours, 4096):
            shown += piece
    out, _ = running.communicate(timeout=60)
    os.close(ours)
    assert running.returncode == 0
    assert out.decode().strip()
    assert "[S" in shown.decode()
    assert "window from" in shown.decode()
