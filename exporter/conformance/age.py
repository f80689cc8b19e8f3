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
from sinkring.exporter.expected_logits import KeyTurn
from sinkring.runtime.bfloat16 import from_host, to_host
from sinkring.runtime.stream import Stream

AGES = (10**3, 10**6, (1 << 24) + 1, 1 << 40)
QUICK_TOKENS = 24
# A key that is kept in fewer bits than it is computed in was rounded when it was stored, and is again when it is turned here.
_ROUNDED_TWICE = 2.0
# Pi to 60 places: 2**40 tokens of a radian each leave more than 40 of them.
_TURN = 2 * Fraction("3.141592653589793238462643383279502884197169399375105820974944")


def check_age(subject: Subject) -> Check:
    """The same text at positions 1e3, 1e6, 2**24 + 1 and 2**40, against the oracle's young stream."""
    at = subject.full_at
    if subject.most_tokens is not None:
        return not_of_this_bundle("I9", f"a stream of it has at most {subject.most_tokens} tokens")
    if lost := _distances_without_end(subject):
        return not_of_this_bundle("I9", lost)
    ids = subject.ids[at:] if subject.full else subject.ids[at : at + QUICK_TOKENS]
    errors, far = {}, []
    with subject.open() as decoder:
        with decoder.stream() as stream:
            stream.feed(subject.ids[:at])
            record, tensors = stream.capture()
        for done, age in enumerate(AGES):
            subject.say("I9", done, len(AGES))
            older = max(age - at, 0)
            if at + older + len(ids) > subject.manifest.position_limit:
                far.append(f"{age:,} is past the bundle's limit of {subject.manifest.position_limit:,}")
                continue
            with decoder.stream() as stream:
                _install_older(subject, stream, record, tensors, older)
                errors[at + older] = subject.off(feed_in_pieces(stream, ids, (1, 1, 5, 1, 2, subject.manifest.chunk)), at)
    subject.say("I9", len(AGES), len(AGES))
    worst = max(errors.values(), default=float("inf"))
    tolerance = subject.tolerance * (1.0 if subject.manifest.cache_dtype == subject.manifest.dtype else _ROUNDED_TWICE)
    figures = ", ".join(f"{error:.2e} at {position:,}" for position, error in errors.items())
    return Check(
        "I9",
        f"{len(ids)} tokens from a full ring, at positions {', '.join(f'{position:,}' for position in errors)}",
        "max |Δlogit| to the oracle's young stream",
        worst,
        tolerance,
        worst <= tolerance,
        "; ".join([figures, *far]),
    )


def _distances_without_end(subject: Subject) -> str | None:
    """Why a stream's age matters by design, if it does: with rotary positions a sink can be aged along with the query, with ALiBi not."""
    sinks = any(geometry.sinks_tokens for geometry in subject.geometries)
    if subject.manifest.policy == "native" and sinks and subject.expected.alibi:
        return "with ALiBi, sinks and policy native the distance to a sink, and so its score, grows with the age"
    return None


def _install_older(subject: Subject, stream: Stream, record: dict[str, Any], tensors: dict[str, NDArray[Any]], tokens: int) -> None:
    """Under the streaming policy sinks stay where they are; all other keys are turned on by `tokens`. Each goes to its new slot."""
    aged = dict(tensors)
    keys = {state.name for state in subject.manifest.states if state.name.endswith(".k")}
    assert keys, "key rings are those whose names end in .k"
    for state in subject.manifest.states:
        assert state.ring is not None, f"{state.name} is in no ring"
        assert state.layer is not None, f"{state.name} is of no layer"
        geometry = subject.geometries[state.ring]
        ring = tensors[state.name]
        turn = subject.expected.turns[state.layer]
        if state.name in keys and turn is not None:
            numbers = from_host(ring, state.dtype)
            older = _turned(numbers, turn, tokens, geometry.sinks_tokens if subject.manifest.policy == "streaming" else 0)
            ring = to_host(older, state.dtype)
        sinks, others = np.split(ring, [geometry.sinks_tokens], axis=2)
        # A token that is `tokens` older lies that many slots further on.
        aged[state.name] = np.concatenate([sinks, np.roll(others, tokens % geometry.slots, axis=2)], axis=2)
    stream.install({**record, "fed": record["fed"] + tokens, "reached": record["reached"] + tokens}, aged)


def _turned(ring: NDArray[np.float32], turn: KeyTurn, tokens: int, first: int) -> NDArray[np.float32]:
    """A key ring [1,G,C,D] whose slots from `first` on are rotated by `tokens` (RoFormer, arXiv 2104.09864)."""
    turns = [Fraction(tokens) * Fraction(float(frequency)) % _TURN for frequency in turn.inv_freq]
    angles = np.array([float(turned) for turned in turns])
    cos, sin, pairs = np.cos(angles), np.sin(angles), len(turn.inv_freq)
    ones, twos = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if turn.interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    old = ring.copy()
    one, two = ring[:, :, first:, ones].astype(np.float64), ring[:, :, first:, twos].astype(np.float64)
    old[:, :, first:, ones] = one * cos - two * sin
    old[:, :, first:, twos] = two * cos + one * sin
    return old
