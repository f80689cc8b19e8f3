"""Ring arithmetic: the only place that computes a slot.

A stream's token at position p is stored in one slot of a cache of C = S + M slots:

    slot(p) = p                      if p < S
              S + (p - S) mod M      otherwise

Slots 0 .. S-1 hold the sinks for ever, the other M the newest tokens. M = W + slack: the slack keeps a chunk of T <= slack + 1 tokens from
overwriting a key that its own first query still needs, and lets up to `slack` tokens be rolled back.

A linear cache is the ring that never wraps: S = 0, W is its stated capacity, M >= W slots, and no token is ever at position W.

Everything here is a pure function of Python integers, so positions never overflow. Words: see the README's shape alphabet.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sinkring.runtime.errors import GeometryError


@dataclass(frozen=True)
class RingGeometry:
    """Shape of one ring.

    sinks_tokens (S): first tokens of a stream, kept for ever.
    window_tokens (W): recent tokens that a query sees, itself included.
    slots (M): ring slots beside the sinks; M - W is the slack.
    wraps: False for a linear cache, which is full after W tokens and then takes no more.

    Raises GeometryError for S < 0, W < 1, M < W, or a linear cache with sinks.
    """

    sinks_tokens: int
    window_tokens: int
    slots: int
    wraps: bool = True

    def __post_init__(self) -> None:
        if self.sinks_tokens < 0:
            raise GeometryError(f"sinks={self.sinks_tokens}: must be 0 or more; 4 suits most models")
        if self.window_tokens < 1:
            raise GeometryError(f"window={self.window_tokens}: must be 1 or more, the current token is one of them")
        if self.slots < self.window_tokens:
            raise GeometryError(
                f"ring slots={self.slots} is less than window={self.window_tokens}: the ring must hold the window; use slots >= window"
            )
        if self.sinks_tokens and not self.wraps:
            raise GeometryError(f"sinks={self.sinks_tokens} in a cache that does not wrap: it keeps every token; use sinks=0")

    @classmethod
    def for_chunk(cls, sinks: int, window: int, chunk: int, slack: int = 0, capacity_multiple: int = 1) -> "RingGeometry":
        """The smallest ring that takes chunks of `chunk` tokens and rolls back `slack` tokens, with C a multiple of `capacity_multiple`."""
        if chunk < 1:
            raise GeometryError(f"chunk={chunk}: must be 1 or more tokens per prefill call")
        if slack < 0:
            raise GeometryError(f"slack={slack}: must be 0 or more tokens")
        slots = window + max(chunk - 1, slack)
        return cls(sinks, window, slots + -(sinks + slots) % capacity_multiple)

    @classmethod
    def linear(cls, capacity: int, capacity_multiple: int = 1) -> "RingGeometry":
        """A linear cache for streams of up to `capacity` tokens; C is rounded up to a multiple of `capacity_multiple`."""
        if capacity < 1:
            raise GeometryError(f"capacity={capacity}: must be 1 or more tokens")
        return cls(0, capacity, capacity + -capacity % capacity_multiple, wraps=False)

    @property
    def capacity(self) -> int:
        """C, the physical slots: S + M."""
        return self.sinks_tokens + self.slots

    @property
    def slack(self) -> int:
        return self.slots - self.window_tokens

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a stream can have at most: the stated capacity of a linear cache, None for a ring."""
        return None if self.wraps else self.window_tokens

    @property
    def longest_chunk(self) -> int:
        """Tokens that one call can write: more would overwrite what its own first query needs, or run past the end."""
        return self.slack + 1 if self.wraps else self.window_tokens

    def slot(self, position: int) -> int:
        """Slot in [0, C) that stores the token at `position` >= 0."""
        if position < self.sinks_tokens:
            return position
        return self.sinks_tokens + (position - self.sinks_tokens) % self.slots

    def wraps_within(self, tokens: int) -> int:
        """How often the ring has begun anew in a stream of `tokens` tokens."""
        return max(tokens - 1 - self.sinks_tokens, 0) // self.slots

    def attended(self, position: int) -> list[int]:
        """Positions that the query at `position` attends to, ascending: A(q) = sinks up to q, then the last W up to q."""
        sinks = range(min(self.sinks_tokens, position + 1))
        recent = range(max(self.sinks_tokens, position - self.window_tokens + 1), position + 1)
        return [*sinks, *recent]

    def room(self, position: int) -> int:
        """Slots from slot(position) to the end of the cache: the longest run of tokens one linear write can store."""
        return self.capacity - self.slot(position)

    def token_at(self, slot: int, position: int) -> int | None:
        """Position of the token that `slot` holds once the token at `position` has been written; None while the slot is unused."""
        if slot < self.sinks_tokens:
            return slot if slot <= position else None
        newest = position - self.sinks_tokens
        if newest < 0:
            return None
        back = (newest - (slot - self.sinks_tokens)) % self.slots
        return None if back > newest else position - back


def split_chunks(position: int, tokens: int, chunk: int, geometries: tuple[RingGeometry, ...]) -> Iterator[int]:
    """Lengths of the calls that feed `tokens` tokens from `position` on: none longer than `chunk`, none across the end of any ring.

    Backends drop or clamp a write past the end of a cache without a word, so a run of tokens is cut where a ring wraps.
    """
    for geometry in geometries:
        if geometry.wraps and chunk > geometry.longest_chunk:
            raise GeometryError(
                f"chunk={chunk} needs a slack of {chunk - 1} tokens, the ring (S={geometry.sinks_tokens}, W={geometry.window_tokens}, "
                f"M={geometry.slots}) has {geometry.slack}: use a chunk of at most {geometry.longest_chunk} or export with more slack"
            )
    end = position + tokens
    while position < end:
        length = min(chunk, end - position, *(geometry.room(position) for geometry in geometries))
        yield length
        position += length
