"""Peers in turns: each in a process of its own, one at work at a time, in another order each round."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from sinkring.exporter.process_memory import memory_bytes

HERE = Path(__file__).parent
# Idle threads of the peer before spin for some milliseconds.
_SETTLE_S = 0.05


class PeerFault(Exception):  # noqa: N818  # a peer that cannot is a finding, not an error
    """What a peer answered when it could not."""


class PeerProcess:
    """One peer, loaded. `program`: a file of this folder and its arguments."""

    def __init__(self, python: Path, program: tuple[str, ...], log: Path) -> None:
        self._log = log.open("w", encoding="utf-8")
        command = [str(python), str(HERE / program[0]), *program[1:]]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8"
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """The peer's answer. Raises PeerFault for an error, or when the process has died."""
        time.sleep(_SETTLE_S)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFault(f"{do}: the process ended with status {self._process.wait()}; see {self._log.name}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFault(answer["error"])
        return answer["value"]

    def resident_bytes(self) -> dict[str, int]:
        """See `memory_bytes`."""
        return memory_bytes(self._process.pid)

    def stop(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._log.close()


def turn(items: list[str], number: int) -> list[str]:
    """The items, begun at another one each round and every second round backwards: no one always follows the same one."""
    start = number // 2 % len(items)
    rotated = [*items[start:], *items[:start]]
    return rotated[::-1] if number % 2 else rotated
