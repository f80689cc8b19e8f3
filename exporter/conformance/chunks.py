"""I1, chunk invariance: any way of cutting the input into calls gives the same logits, those of the oracle."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Subject

# Calls of a short length at each place of the ring in the quick suite; between the places the text is fed in one call.
QUICK_CALLS = 8


def check_chunks(subject: Subject) -> Check:
    """T in {1, 3, W, W+1, 3W, chunk, chunk+1} and mixed, from the start, in the middle of the ring, across its end and later."""
    tokens, windows, chunk = len(subject.ids), {geometry.window_tokens for geometry in subject.geometries}, subject.manifest.chunk
    lengths = sorted({1, 3, chunk, chunk + 1} | {length for window in windows for length in (window, window + 1, 3 * window)})
    plans = {f"T={length}": _calls(subject, partial(int, length)) for length in lengths}
    rng = np.random.default_rng(1)
    plans["mixed"] = _calls(subject, lambda: int(rng.integers(1, min(2 * chunk + 2, tokens))))
    worst, where = 0.0, ""
    with subject.open() as decoder:
        for done, (name, calls) in enumerate(plans.items()):
            subject.say("I1", done, len(plans) + 1)
            with decoder.stream() as stream:
                position = 0
                for length in calls:
                    piece = subject.ids[position : position + length]
                    off = subject.off(stream.feed(piece, all_logits=True), position)
                    if off > worst:
                        worst, where = off, f"{name}, positions {position}..{position + len(piece) - 1}"
                    position += len(piece)
        # Token by token through the decode graph, which `feed` leaves to prefill when there are several rows.
        with decoder.stream() as stream:
            for position in range(min(tokens, 2 * QUICK_CALLS)):
                off = subject.off(decoder.step({stream: int(subject.ids[position])})[stream], position)
                if off > worst:
                    worst, where = off, f"step, position {position}"
    subject.say("I1", len(plans) + 1, len(plans) + 1)
    return Check(
        "I1",
        f"{tokens} tokens in calls of T = {', '.join(map(str, lengths))} and mixed, by feed and by step",
        "max |Δlogit| to the oracle",
        worst,
        subject.tolerance,
        worst <= subject.tolerance,
        f"worst at {where}",
    )


def _calls(subject: Subject, draw: Callable[[], int]) -> Iterator[int]:
    """Lengths of calls over the whole text: `draw()` at each, but in the quick suite only around some places of the ring."""
    tokens = len(subject.ids)
    first = draw()
    places = {0, tokens - QUICK_CALLS * first}
    for geometry in subject.geometries:
        # Before the end of the ring by half a call, so that one call lies across it.
        places |= {geometry.sinks_tokens + geometry.slots // 2, geometry.capacity - first // 2 - 2}
    position = 0
    for place in sorted(place for place in places if 0 <= place < tokens):
        if place > position:
            yield place - position
            position = place
        for _ in range(tokens if subject.full else QUICK_CALLS):
            if position >= tokens:
                return
            length = draw()
            yield length
            position += length
    if position < tokens:
        yield tokens - position
