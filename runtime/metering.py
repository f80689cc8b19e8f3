"""How fast a stream reads and writes. Only the model's own time counts: not the user's, not the printing's."""

import time
from collections.abc import Iterator

from sinkring.runtime.stream import Ids, Stream


class Meter:
    """Adds up over any number of turns. All times are wall time in seconds."""

    def __init__(self) -> None:
        self.fed_tokens = 0
        self.fed_seconds = 0.0
        self.generated_tokens = 0
        self.steps = 0
        self.step_seconds = 0.0

    def feed(self, stream: Stream, ids: Ids) -> None:
        """`stream.feed(ids)`, timed."""
        began = time.perf_counter()
        stream.feed(ids)
        self.fed_seconds += time.perf_counter() - began
        self.fed_tokens += len(ids)

    def count(self, tokens: Iterator[int]) -> Iterator[int]:
        """The tokens of one `Stream.generate`, timed.

        The first one after a `feed` is sampled from logits that are there already: it counts as a token, not as a step of the model.
        """
        first = True
        while True:
            began = time.perf_counter()
            try:
                token = next(tokens)
            except StopIteration:
                return
            if not first:
                self.steps += 1
                self.step_seconds += time.perf_counter() - began
            first = False
            self.generated_tokens += 1
            yield token

    @property
    def tokens_per_second(self) -> float | None:
        """Steps of one token per second, sampling included; None before the first step."""
        return self.steps / self.step_seconds if self.step_seconds else None

    @property
    def fed_tokens_per_second(self) -> float | None:
        """Tokens of prompts read per second; None before the first."""
        return self.fed_tokens / self.fed_seconds if self.fed_seconds else None
