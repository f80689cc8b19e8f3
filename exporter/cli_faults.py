"""How a command ends when something is wrong: one line on stderr and an exit status, never a traceback for what a user can mend."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

USER_ERROR = 2
# What a shell reports for a program that a signal ended: 128 + SIGINT, 128 + SIGPIPE.
INTERRUPTED = 130
PIPE_CLOSED = 141


@contextmanager
def one_line_faults() -> Iterator[None]:
    """Turns a SinkringError, an error of the system (a full disk), Ctrl-C and a closed pipe into SystemExit. Others are bugs: they pass."""
    try:
        yield
        # Here and not at shutdown, where a full disk could only be complained about.
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(PIPE_CLOSED) from None
    except OSError as error:
        _drop_output()
        where = f": {error.filename}" if error.filename else ""
        _complain(f"{error.strerror or error}{where}")
        raise SystemExit(USER_ERROR) from None
    except Exception as error:
        # Loaded here, as it brings numpy along; whoever raised it has loaded it before.
        from sinkring.runtime.errors import SinkringError

        if not isinstance(error, SinkringError):
            raise
        _complain(str(error))
        raise SystemExit(USER_ERROR) from None


@contextmanager
def needs_extra(extra: str, command: str) -> Iterator[None]:
    """Around imports: a package that is missing becomes a DependencyError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sinkring"):
            raise
        from sinkring.runtime.errors import DependencyError

        raise DependencyError(f"sinkring {command} needs the package {error.name}: pip install 'sinkring[{extra}]'") from None


def _complain(message: str) -> None:
    print(f"error: {' '.join(line.strip() for line in message.splitlines())}", file=sys.stderr)


def _drop_output() -> None:
    """What stdout still holds goes nowhere: Python would try once more at shutdown, and fail with a message of its own."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
        except (OSError, ValueError):  # a stdout without a file behind it has nothing to fail on
            return
        os.close(nowhere)
