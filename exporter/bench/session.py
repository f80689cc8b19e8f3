"""One bundle, opened and full, on which the pieces of a benchmark are timed."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from sinkring.exporter.bench.placing import full_at, place
from sinkring.exporter.bench.read_bytes import step_read_bytes
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.runtime.decoder import Decoder, open_bundle
from sinkring.runtime.manifest import Manifest

OLDEST = 1_000_000
# A larger ring is filled with the same text again and again.
MOST_TEXT_TOKENS = 16_384
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
# Whose host work is told. A nucleus of the whole vocabulary is the costliest of the usual samplers.
SAMPLERS: Mapping[str, Mapping[str, Any]] = {"greedy": GREEDY, "nucleus": {"temperature": 0.7, "top_p": 0.9, "seed": 0}}


class BenchSession:
    """A decoder with a stream in every row. Times are in ms, of a step of all rows together.

    positions: where steps are timed: 0, C/2, C, 10 C and 1e6 of the largest ring; of a linear cache 0 and the middle. full: that of them
    at which the ring is full (a linear cache: half). read_bytes: of one step. resident_bytes: what opening the bundle, a prompt that fills
    it and a step have added to the process. open_seconds: without the check of all hashes. Fed is text, by the bundle's tokenizer if it has
    one.
    """

    def __init__(self, bundle: Path, backend: str, target: str | None, options: Mapping[str, Any]) -> None:
        text = read_reference_ids(bundle, Manifest.read(bundle), MOST_TEXT_TOKENS).ids
        process = psutil.Process()
        before = int(process.memory_info().rss)
        began = time.perf_counter()
        self.decoder: Decoder = open_bundle(bundle, backend, target=target, verify=False, **options)
        self.open_seconds = time.perf_counter() - began
        manifest = self.decoder.manifest
        self.read_bytes = step_read_bytes(bundle, manifest, target or backend)
        self.full = full_at(self.decoder)
        endless = self.longest_prompt == manifest.position_limit
        wanted = (0, self.full // 2, self.full, 10 * self.full, OLDEST) if endless else (0, self.full)
        self.positions = tuple(dict.fromkeys(position for position in sorted(wanted) if position <= manifest.position_limit // 2))
        # Of text the next token is nearly known, of random ids it is not, and sampling takes up to three times as long.
        self._ids = np.resize(text, self.full)
        self._streams = [self.decoder.stream() for _ in range(manifest.batch)]
        for stream in self._streams:
            stream.feed(self._ids[:1])
        self._streams[0].feed(self._ids)
        self._step(GREEDY)
        self.resident_bytes = int(process.memory_info().rss) - before
        self._streams[0].reset()
        self._streams[0].feed(self._ids)
        self._full_state = self._streams[0].capture()

    def time_steps(self, position: int, steps: int) -> NDArray[np.float64]:
        """Greedy steps, back to back, from `position` on; as many as a linear cache has room for."""
        self._go_to(position)
        return np.array([self._step(GREEDY) for _ in range(self._at_most(position, steps))])

    def time_paced(self, steps: int, cadence_s: float) -> NDArray[np.float64]:
        """Greedy steps of a full ring, one every `cadence_s`: threads and clocks have gone to rest in between."""
        self._go_to(self.full)
        times = np.zeros(self._at_most(self.full, steps))
        due = time.perf_counter()
        for index in range(len(times)):
            due += cadence_s
            time.sleep(max(due - time.perf_counter(), 0.0))
            times[index] = self._step(GREEDY)
        return times

    def time_host(self, steps: int, sampling: Mapping[str, Any]) -> tuple[float, float]:
        """(ms of a step, ms of it outside the graph's run), means over `steps` steps of a full ring: Python, sampling, copies of logits."""
        self._go_to(self.full)
        steps = self._at_most(self.full, steps)
        self._step(sampling)  # with other options than the last, a sampler is made
        backend, inside = self.decoder.backend, 0.0
        run = backend.decode

        def timed(idle: Sequence[int] = ()) -> None:
            nonlocal inside
            began = time.perf_counter()
            run(idle)
            inside += (time.perf_counter() - began) * 1e3

        backend.decode = timed  # type: ignore[method-assign]  # for these steps
        try:
            whole = sum(self._step(sampling) for _ in range(steps))
        finally:
            backend.decode = run  # type: ignore[method-assign]
        return whole / steps, (whole - inside) / steps

    def time_prompt(self, tokens: int) -> tuple[float, float]:
        """(ms to read a prompt into an empty row, ms until its first token is there)."""
        stream = self._streams[0]
        stream.reset()
        prompt = np.resize(self._ids, min(tokens, self.longest_prompt))
        began = time.perf_counter()
        stream.feed(prompt)
        read = time.perf_counter()
        stream.sample(**GREEDY)
        return (read - began) * 1e3, (time.perf_counter() - began) * 1e3

    @property
    def longest_prompt(self) -> int:
        """Tokens, of a linear cache its capacity."""
        most = [ring.geometry.most_tokens for ring in self.decoder.manifest.rings]
        return min((tokens for tokens in most if tokens is not None), default=self.decoder.manifest.position_limit)

    def close(self) -> None:
        self.decoder.close()

    def _at_most(self, position: int, steps: int) -> int:
        """Two tokens are fed before the first step that is timed."""
        return max(min(steps, self.longest_prompt - position - 2), 1)

    def _go_to(self, position: int) -> None:
        """All rows, and one step on that nobody times: the CPU's caches hold what was just copied."""
        state = place(self._full_state, self.decoder.manifest, position) if position else None
        for stream in self._streams:
            if state:
                stream.install(*state)
            else:
                stream.reset()
                # A first token, for the next to be sampled from.
                stream.feed(self._ids[:1])
        self._step(GREEDY)

    def _step(self, sampling: Mapping[str, Any]) -> float:
        """Pick each row's next token and feed it; ms."""
        began = time.perf_counter()
        self.decoder.step({stream: stream.sample(**sampling) for stream in self._streams})
        return (time.perf_counter() - began) * 1e3
