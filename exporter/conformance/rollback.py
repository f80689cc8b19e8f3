"""I7: rolled back by k tokens, up to the slack, = never fed; by more is refused. Before, across and after a wrap."""

import numpy as np
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Logits, Subject, largest_difference
from sinkring.exporter.geometries import slack_tokens
from sinkring.runtime.errors import CapacityError
from sinkring.runtime.stream import Stream

# (start, stop) of tokens of the text, fed in one call.
Call = tuple[int, int]


def check_rollback(subject: Subject) -> Check:
    """Between the calls of one stream, other tokens are fed and taken back; a second stream is only given the calls."""
    tokens = len(subject.ids)
    # Not geometry.slack: that is the runtime's to get right.
    least = slack_tokens(subject.manifest)
    slack = tokens // 4 if least is None else least
    drafts = _drafts(slack, subject.full)
    faults: list[str] = []
    wrapping = [geometry for geometry in subject.geometries if geometry.wraps]
    # Before, across and after each ring's end.
    ends = {place for geometry in wrapping for place in (geometry.sinks_tokens + 1, max(1, geometry.capacity - slack - 2))}
    places = sorted(place for place in (ends | {subject.full_at} if wrapping else {1, tokens // 2}) if place < tokens)
    calls = _calls(subject, places, len(drafts))
    with subject.open() as decoder:
        with decoder.stream() as stream:
            plain = [stream.feed(subject.ids[start:stop]) for start, stop in calls]
        with decoder.stream() as stream:
            rolled = _with_drafts(subject, stream, calls, drafts, faults)
            if wrapping:
                _must_refuse(subject, stream, slack, faults)
    off = max(subject.off(logits, stop - 1) for (_, stop), logits in zip(calls, plain, strict=True))
    worst = largest_difference(np.stack(rolled), np.stack(plain))
    subject.say("I7", 1, 1)
    oracle = f"never fed is {off:.2e} from the oracle, where {subject.tolerance:.2e} is allowed"
    return Check(
        "I7",
        f"k = {', '.join(map(str, drafts)) or 'none, the slack is 0'} at positions from {', '.join(map(str, places))} on; "
        + (f"more than the slack of {slack} refused" if wrapping else "a cache that never wraps"),
        "max |Δlogit| to never fed",
        worst,
        0.0,
        worst == 0 and off <= subject.tolerance and not faults,
        "; ".join([*faults[:4], oracle]),
    )


def _drafts(slack: int, full: bool) -> list[int]:
    if full and slack <= 128:
        return list(range(1, slack + 1))
    return sorted({k for k in (1, 2, slack // 2, slack - 1, slack) if 1 <= k <= slack})


def _calls(subject: Subject, places: list[int], drafts: int) -> list[Call]:
    """Up to each place in one call, then for each draft one call of one to three tokens."""
    calls, position, tokens = [], 0, len(subject.ids)
    for place in places:
        if place > position:
            calls.append((position, place))
            position = place
        for number in range(max(drafts, 1)):
            stop = min(position + 1 + number % 3, tokens)
            if stop > position:
                calls.append((position, stop))
                position = stop
    return calls


def _with_drafts(subject: Subject, stream: Stream, calls: list[Call], drafts: list[int], faults: list[str]) -> list[Logits]:
    logits = []
    for number, (start, stop) in enumerate(calls):
        if number and drafts:
            k = drafts[number % len(drafts)]
            stream.feed(subject.other_ids(k, seed=number))
            stream.rollback(k)
            if stream.position != start:
                faults.append(f"after a rollback of {k} to {start} the stream is at position {stream.position}")
        logits.append(stream.feed(subject.ids[start:stop]))
    return logits


def _must_refuse(subject: Subject, stream: Stream, slack: int, faults: list[str]) -> None:
    """The ring has wrapped: one token more than the slack is forgotten, and a refusal must change nothing."""
    past_the_end = max(slack, 1) + min(geometry.capacity for geometry in subject.geometries if geometry.wraps)
    if subject.most_tokens is not None:
        past_the_end = min(past_the_end, subject.most_tokens - stream.position)
    if past_the_end > 0:
        stream.feed(subject.other_ids(past_the_end, seed=7))
    before = stream.position
    for tokens in (slack + 1, slack + 2, before):
        try:
            stream.rollback(tokens)
            faults.append(f"a rollback of {tokens} tokens, more than the slack of {slack}, was accepted")
            return
        except CapacityError:
            pass
    if stream.position != before:
        faults.append(f"a refused rollback has moved the stream from {before} to {stream.position}")
