"""I9, age does not matter: a stream that has run for weeks gives the logits of a young one.

A young stream with a full ring is made old without feeding it: keys lie rotated by their absolute position, so its keys are turned further,
by an angle that is reduced to one turn in exact arithmetic. Nothing here uses the exporter's tables.
"""

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.conformance.findings import Check, not_of_this_bundle
from sinkring.exporter.conformance.subject import Subject, feed_in_pieces
from sinkring.runtime.stream import Stream

AGES = (10**3, 10**6, (1 << 24) + 1, 1 << 40)
QUICK_TOKENS = 24
# Pi to 60 places: 2**40 tokens of a radian each leave more than 40 of them.
_TURN = 2 * Fraction("3.141592653589793238462643383279502884197169399375105820974944")


def check_age(subject: Subject) -> Check:
    """The same text at positions 1e3, 1e6, 2**24 + 1 and 2**40, against the oracle's young stream."""
    geometry, at = subject.geometry, subject.full_at
    if not geometry.wraps:
        return not_of_this_bundle("I9", f"a stream of it has at most {geometry.most_tokens} tokens")
    ids = subject.ids[at:] if subject.full else subject.ids[at : at + QUICK_TOKENS]
    errors, far = {}, []
    with subject.open() as decoder:
        with decoder.stream() as stream:
            stream.feed(subject.ids[:at])
            record, tensors = stream.capture()
        for done, age in enumerate(AGES):
            subject.say("I9", done, len(AGES))
            # A multiple of M, so that every token keeps its slot.
            older = -(-(age - at) // geometry.slots) * geometry.slots
            if at + older + len(ids) > subject.manifest.position_limit:
                far.append(f"{age:,} is past the bundle's limit of {subject.manifest.position_limit:,}")
                continue
            with decoder.stream() as stream:
                _install_older(subject, stream, record, tensors, max(older, 0))
                errors[at + max(older, 0)] = subject.off(feed_in_pieces(stream, ids, (1, 1, 5, 1, 2, subject.manifest.chunk)), at)
    subject.say("I9", len(AGES), len(AGES))
    worst = max(errors.values(), default=float("inf"))
    figures = ", ".join(f"{error:.2e} at {position:,}" for position, error in errors.items())
    return Check(
        "I9",
        f"{len(ids)} tokens from a full ring, at positions {', '.join(f'{position:,}' for position in errors)}",
        "max |Δlogit| to the oracle's young stream",
        worst,
        subject.tolerance,
        worst <= subject.tolerance,
        "; ".join([figures, *far]),
    )


def _install_older(subject: Subject, stream: Stream, record: dict[str, Any], tensors: dict[str, NDArray[Any]], tokens: int) -> None:
    """Under the streaming policy sinks stay where they are; all other keys are turned on by `tokens`."""
    first = subject.geometry.sinks_tokens if subject.manifest.policy == "streaming" else 0
    keys = [state.name for state in subject.manifest.states if state.name.endswith(".k")]
    assert keys, "key rings are those whose names end in .k"
    turned = {name: _turned(tensors[name], subject.expected.inv_freq, tokens, first) for name in keys}
    stream.install({**record, "fed": record["fed"] + tokens, "reached": record["reached"] + tokens}, {**tensors, **turned})


def _turned(ring: NDArray[np.float32], inv_freq: NDArray[np.float32], tokens: int, first: int) -> NDArray[np.float32]:
    """A key ring [1,G,C,D] whose slots from `first` on are rotated by `tokens` (RoFormer, arXiv 2104.09864; entry i with i + R/2)."""
    turns = [Fraction(tokens) * Fraction(float(frequency)) % _TURN for frequency in inv_freq]
    angles = np.array([float(turn) for turn in turns])
    cos, sin, half = np.cos(angles), np.sin(angles), len(inv_freq)
    old = ring.copy()
    one, two = ring[:, :, first:, :half].astype(np.float64), ring[:, :, first:, half : 2 * half].astype(np.float64)
    old[:, :, first:, :half] = one * cos - two * sin
    old[:, :, first:, half : 2 * half] = two * cos + one * sin
    return old
