"""The ring as one line of text, for `sinkring run --watch`: where the sinks, the newest token and the old ones lie."""

from sinkring.runtime.ring import RingGeometry

SINK, HEAD, FORGOTTEN, EMPTY = "S", "█", "·", " "
# From the newest third of the window to the oldest.
AGES = "▓▒░"


def ring_line(geometry: RingGeometry, tokens: int, columns: int) -> str:
    """A stream of `tokens` tokens in at most `columns` characters; each stands for as many slots as it must, and shows the newest of them.

    The head is where the latest token was written; what lies behind it ages from ▓ to ░, then is out of the window (·) until it is
    overwritten. Says the position, and how many tokens ago the window begins.
    """
    if not tokens:
        return "ring empty"
    position = tokens - 1
    laps = geometry.wraps_within(tokens) if geometry.wraps else 0
    oldest = position - min(position, geometry.window_tokens - 1)
    words = f" token {position:,}, window from {oldest:,}" + (f", wrapped {laps:,} times" if laps else "")
    room = max(columns - len(words) - 2, 8)
    per_box = -(-geometry.slots // max(room - min(geometry.sinks_tokens, room // 4), 1))
    sinks = SINK * min(geometry.sinks_tokens, tokens, room // 4)
    boxes = [
        _box(geometry, range(first, min(first + per_box, geometry.capacity)), position)
        for first in range(geometry.sinks_tokens, geometry.capacity, per_box)
    ]
    return f"[{sinks}{''.join(boxes)}]{words}"


def _box(geometry: RingGeometry, slots: range, position: int) -> str:
    held = [token for slot in slots if (token := geometry.token_at(slot, position)) is not None]
    if not held:
        return EMPTY
    age = position - max(held)
    if age == 0:
        return HEAD
    return AGES[age * len(AGES) // geometry.window_tokens] if age < geometry.window_tokens else FORGOTTEN
