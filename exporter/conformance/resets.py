"""I5: a reset row equals a fresh one, whatever the old one held: 0 times NaN is NaN, so a mask alone does not clean a row."""

import numpy as np
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Subject, feed_in_pieces, largest_difference, stream_on_row
from sinkring.runtime.bfloat16 import to_host
from sinkring.runtime.decoder import Decoder

POISONS = (np.nan, np.inf, -np.inf, 1e30)


def check_resets(subject: Subject) -> Check:
    """Poison every state of a row, then reset it, or close its stream and take a new one; compare with a decoder just opened."""
    count = min(len(subject.ids), subject.full_at + 16 if subject.full else 24)
    lengths = (1, 1, 3, subject.manifest.chunk, 2)
    ids = subject.ids[:count]
    rows = range(subject.manifest.batch) if subject.full else [subject.manifest.batch - 1]
    worst, off, where = 0.0, 0.0, ""
    for row in rows:
        with subject.open() as decoder:
            fresh = feed_in_pieces(stream_on_row(decoder, row), ids, lengths)
        off = max(off, subject.off(fresh, 0))
        # One decoder for all tries: each begins where the one before was found to have left nothing.
        with subject.open() as decoder:
            for poison in POISONS:
                for way in ("reset", "close"):
                    stream = stream_on_row(decoder, row)
                    feed_in_pieces(stream, ids, lengths)
                    _poison(decoder, row, poison)
                    if way == "reset":
                        stream.reset()
                    else:
                        stream.close()
                        stream = stream_on_row(decoder, row)
                    difference = largest_difference(feed_in_pieces(stream, ids, lengths), fresh)
                    if difference > worst:
                        worst, where = difference, f"{way} of row {row} after {poison}"
                    stream.close()
    oracle = f"the fresh row is {off:.2e} from the oracle, where {subject.tolerance:.2e} is allowed"
    return Check(
        "I5",
        f"rows {', '.join(map(str, rows))}, every state NaN, Inf, -Inf, 1e30; reset, or closed and taken anew; {count} tokens after it",
        "max |Δlogit| to a fresh row",
        worst,
        0.0,
        worst == 0 and off <= subject.tolerance,
        f"worst at {where}; {oracle}" if where else oracle,
    )


def _poison(decoder: Decoder, row: int, value: float) -> None:
    held = decoder.backend.read_row(row)
    for state in decoder.manifest.states:
        # A finite one stays finite, also in float16, which does not reach so far.
        most = float(np.finfo(np.float16).max) if state.dtype == "float16" else np.inf
        held[state.name][...] = to_host(min(value, most) if np.isfinite(value) else value, state.dtype)
    decoder.backend.write_row(row, held)
