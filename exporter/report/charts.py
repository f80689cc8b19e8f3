"""Drawings of the report: lines as SVG, and the ring as boxes that wrap where the screen ends.

Colours are the page's own (see `page.STYLE`), so they follow light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sinkring.runtime.ring import RingGeometry

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
# More boxes than this are too small to tell apart: a long ring is drawn as a few tokens a box.
MOST_BOXES = 64


@dataclass(frozen=True)
class Line:
    """points: (x, y), in the order in which they are joined."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, from_zero: bool = False) -> str:
    """One <svg>. Points that are not finite are left out; from_zero: the y axis begins at 0."""
    points = [point for line in lines for point in line.points if all(map(math.isfinite, point))]
    if not points:
        return "<p>nothing was measured</p>"
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(0.0 if from_zero else math.inf, *(y for _, y in points)), max(y for _, y in points)
    margin = 0.05 * (y_high - y_low) or abs(y_high) * 0.05 or 1.0
    y_low, y_high = (y_low if from_zero else y_low - margin), y_high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low or 1.0)
        up = (y - y_low) / (y_high - y_low)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for value in _ticks(y_low, y_high):
        _, y = place(x_low, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(x_low, x_high):
        x, _ = place(value, y_low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:,g}</text>')
    for number, line in enumerate(lines):
        sound = [place(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in sound)
        parts.append(f'<polyline class="line c{number % 6}" points="{path}"/>')
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text transform="translate(12 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    legend = "".join(f'<span><i class="c{number % 6}"></i>{escape(line.name)}</span>' for number, line in enumerate(lines))
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">{"".join(parts)}</svg>'
    return f'<figure>{picture}<figcaption class="legend">{legend}</figcaption></figure>'


def ring_frames(geometry: RingGeometry) -> tuple[tuple[str, int], ...]:
    """(what it shows, position of the newest token) of the moments that the report draws."""
    sinks, window, capacity = geometry.sinks_tokens, geometry.window_tokens, geometry.capacity
    if not geometry.wraps:
        return ("half full", max(window // 2 - 1, 0)), ("full: a further token is refused", window - 1)
    return (
        ("filling: all tokens are seen", (sinks + window) // 2),
        ("the first token leaves the window, and stays in its slot for a while", sinks + window),
        ("the first slot after the sinks is written anew: the ring wraps", capacity),
        ("later: sinks, and the newest tokens, wherever the head is", capacity + geometry.slots + geometry.slots // 3),
    )


def ring_drawing(geometry: RingGeometry, position: int) -> str:
    """All C slots in their order, as HTML, once the token at `position` is written: sinks, window, forgotten, empty, and the head."""
    per_box = -(-geometry.capacity // MOST_BOXES)
    seen = set(geometry.attended(position))
    head = geometry.slot(position)
    slots = [list(range(geometry.sinks_tokens))] if geometry.sinks_tokens and per_box > 1 else []
    first = geometry.sinks_tokens if slots else 0
    slots += [list(range(start, min(start + per_box, geometry.capacity))) for start in range(first, geometry.capacity, per_box)]
    parts = []
    for box in slots:
        held = [geometry.token_at(slot, position) for slot in box]
        tokens = [token for token in held if token is not None]
        kind = "empty"
        if tokens:
            kind = "sink" if box[-1] < geometry.sinks_tokens else "window" if any(token in seen for token in tokens) else "forgotten"
        label = "" if not tokens else str(tokens[0]) if len(box) == 1 else f"{min(tokens)}.."
        where = f"slot {box[0]}" if len(box) == 1 else f"slots {box[0]} to {box[-1]}"
        what = "empty" if not tokens else f"token {tokens[0]}" if len(box) == 1 else f"tokens {min(tokens)} to {max(tokens)}"
        classes = f"{kind} head" if head in box else kind
        parts.append(f'<span class="{classes}" title="{where}: {what}">{label}</span>')
    return f'<div class="ring" role="img" aria-label="the ring after token {position}">{"".join(parts)}</div>'


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    step = 10 ** math.floor(math.log10((high - low) / 4 or 1.0))
    step *= next((factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= 6), 10)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]
