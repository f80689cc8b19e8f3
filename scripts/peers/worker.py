"""The line protocol of a peer's process: one JSON object a line on stdin, one a line on stdout. Standard library only, for any environment.

A peer's own words on stdout, also those of its C++ code, are turned to stderr.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Peer(Protocol):
    """What is measured of a peer. Every step is a greedy one: logits, their argmax, and that token fed.

    ids: token ids of a real text, `window` and more of them.
    """

    def load(self, model: str, ids: list[int], window: int, threads: int, steps: int) -> dict[str, str]:
        """Make ready for `steps` steps from a cache that holds `window` tokens. Returns the versions of what runs."""

    def prefill(self, tokens: int) -> float:
        """Milliseconds to read the first `tokens` ids into an empty cache, the logits of the last included."""

    def decode(self, steps: int) -> list[float]:
        """Milliseconds of each of `steps` steps, from a cache that holds `window` tokens (of a ring: that is full)."""

    def beyond(self) -> str:
        """Go on past the context that it was given, and say what happened."""

    def losses(self, piece: list[int]) -> list[float]:
        """Nats of each token of `piece` but the first, from an empty cache."""


def serve(peer: Peer) -> None:
    """Answer until stdin ends. An error is an answer too: {"error": ...}."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    calls: dict[str, Callable[..., Any]] = {
        name: getattr(peer, name) for name in ("load", "prefill", "decode", "beyond", "losses") if hasattr(peer, name)
    }
    for line in sys.stdin:
        request = json.loads(line)
        call = request.pop("do")
        try:
            began = time.perf_counter()
            value = calls[call](**request)
            answer = {"value": value, "seconds": time.perf_counter() - began}
        except Exception as error:  # whatever a library raises is what it has to say
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def timed_ms(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def losses_of(logits: Any, piece: list[int]) -> list[float]:
    """Nats of piece[1:] under logits [len(piece), V] of any array type with numpy's interface."""
    import numpy as np

    rows = np.asarray(logits, np.float64)[: len(piece) - 1]
    top = rows.max(axis=1)
    total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
    return (total - rows[np.arange(len(rows)), piece[1:]]).tolist()
