"""The command line, run in this process: quick, and with stdin, stdout and stderr as bytes."""

import io
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from sinkring.exporter.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines of stderr that say `error:`."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def invoke(*arguments: object, stdin: bytes = b"") -> Ended:
    """`sinkring ARGUMENTS`, with `stdin` piped in."""
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", write_through=True) for data in (stdin, b"", b"")]
    given, out, err = streams
    with mock.patch.object(sys, "stdin", given), redirect_stdout(out), redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return Ended(status, _written(out), _written(err))


def spawn(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    """The same as a process of its own, its stdout and stderr pipes unless `options` say otherwise."""
    command = [sys.executable, "-m", "sinkring.exporter.cli", *map(str, arguments)]
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    # A job that a shell put in the background ignores Ctrl-C, and so would its children: the tests must not depend on who started them.
    settings.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    return subprocess.Popen(command, **settings)  # type: ignore[call-overload]


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode("utf-8")
