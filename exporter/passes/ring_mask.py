"""Which slots a query may attend to, and how far back they are, as graph nodes: the only place that writes a mask.

For the query at position q, stored in slot w:   age(j) = (w - j) mod M
    valid(j) = j <= q                            if j < S
               age(j) < W and age(j) <= q - S    otherwise
Ages past q - S are slots that the stream has not reached yet; while q < S no ring slot is valid, whatever its age comes out as.

All of that speaks of the ring after the write of the call's T new rows. A graph that reads the ring as it was before takes the slots
w .. w+T-1 that the write will replace out of the mask, and attends to the new rows beside it: row u is valid for the query of row t if
    u <= t and (t - u < W or position + u < S)
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from sinkring.exporter.node import RingAttentionAttributes
from sinkring.exporter.passes.insertion import Insertion

# Finite, so that adding a score cannot make a NaN; its share of a softmax is exactly 0 next to any real score.
MASKED = -1e30
READ_STEPS = (64, 16, 4, 1)  # slots
NEVER = np.iinfo(np.int64).max  # a position no stream reaches


@dataclass(frozen=True)
class Queries:
    """Where the queries of one call are: position int64 [B,1,T,1], and the age of each slot as they see it, int64 [B,1,T,C]."""

    position: ir.Value
    age: ir.Value


def write_queries(
    into: Insertion, a: RingAttentionAttributes, position: ir.Value, write_index: ir.Value, tokens: ir.Value | int
) -> Queries:
    """`tokens` is T, a number or an int64 scalar value."""
    axes = into.ints(1, 2, 3)

    def per_query(first: ir.Value) -> ir.Value:  # [B] -> [B,1,T,1]: the first token's number, counted up along the chunk
        column = into.op("Unsqueeze", first, axes)
        if isinstance(tokens, int) and tokens == 1:
            return column
        zero, one = into.constant("i64.zero", np.array(0, np.int64)), into.constant("i64.one", np.array(1, np.int64))
        offsets = into.op("Range", zero, _count(into, tokens), one)
        return into.op("Add", column, into.op("Unsqueeze", offsets, into.ints(0, 1, 3)))

    q, w = per_query(position), per_query(write_index)
    slots = np.arange(a.capacity, dtype=np.int64)
    # (M - j) is baked in so that the operand of Mod is not negative wherever its result counts.
    age = into.op(
        "Mod",
        into.op("Add", w, into.constant(f"{_key(a)}.slots_minus_j", (a.slots - slots)[None, None, None])),
        into.constant(f"{_key(a)}.slots", np.array(a.slots, np.int64)),
    )
    return Queries(q, age)


def read_step(capacity: int) -> int:
    """In what steps the part of a ring that is read grows, in slots: long enough for whole vectors, and few different lengths."""
    return next(step for step in READ_STEPS if step <= max(1, capacity // 8))


def write_reached(into: Insertion, a: RingAttentionAttributes, position: ir.Value, rows: int, tokens: ir.Value | int) -> ir.Value:
    """int64 [1]: how many slots, counted from the first, hold all that any row of the call has stored, its T new rows included.

    Before a ring first wraps, slot and position are one number. A multiple of `read_step`, but at least S and at most C.
    """
    step = read_step(a.capacity)
    last = into.op("ReduceMax", position, into.ints(0), keepdims=1) if rows > 1 else position
    behind = into.op("Add", last, _count(into, tokens))
    if step > 1:
        one_step = into.constant(f"i64.step{step}", np.array(step, np.int64))
        behind = into.op("Add", behind, into.constant(f"i64.step{step}.less_one", np.array(step - 1, np.int64)))
        behind = into.op("Mul", into.op("Div", behind, one_step), one_step)
    most = into.constant(f"{_key(a)}.capacity", np.array(a.capacity, np.int64))
    return into.op("Clip", behind, into.constant(f"{_key(a)}.sinks", np.array(a.sinks, np.int64)), most)


def write_validity(into: Insertion, a: RingAttentionAttributes, queries: Queries) -> ir.Value:
    """bool [B,1,T,C]: may token t of row b attend to slot j."""
    slots, key = np.arange(a.capacity, dtype=np.int64), _key(a)
    # Both limits are per slot, so that no Where over booleans is needed (ONNX Runtime has none): a sink has no window, the ring no sink.
    window = np.where(slots < a.sinks, 0, a.window)[None, None, None]
    in_window = into.op("Less", queries.age, into.constant(f"{key}.window", window))
    if not a.sinks:
        return into.op("And", in_window, into.op("LessOrEqual", queries.age, queries.position))
    sinks = into.constant(f"{key}.sinks", np.array(a.sinks, np.int64))
    reached = into.op("LessOrEqual", queries.age, into.op("Sub", queries.position, sinks))
    sink_from = np.where(slots < a.sinks, slots, NEVER)[None, None, None]
    sink = into.op("LessOrEqual", into.constant(f"{key}.sink_from", sink_from), queries.position)
    return into.op("Or", sink, into.op("And", in_window, reached))


def write_additive(into: Insertion, validity: ir.Value) -> ir.Value:
    """float32 [B,1,T,C] to add to scores: 0 where valid, MASKED elsewhere."""
    zero, masked = into.constant("mask.zero", np.array(0, np.float32)), into.constant("mask.masked", np.array(MASKED, np.float32))
    return into.op("Where", validity, zero, masked)


def write_alibi(into: Insertion, a: RingAttentionAttributes, queries: Queries, additive: ir.Value) -> ir.Value:
    """float32 [B,H,T,C]: the additive mask [B,1,T,C] less slope * distance. Distances are int64 until they are differences of positions."""
    distance = queries.age
    if a.sinks:
        slots = np.arange(a.capacity, dtype=np.int64)[None, None, None]
        to_sink = into.op("Sub", _nearest(into, a, queries), into.constant(f"{_key(a)}.j", slots))
        distance = into.op("Where", into.constant(f"{_key(a)}.is_sink", slots < a.sinks), to_sink, distance)
    return _less_slopes(into, a, distance, additive)


def write_kept(into: Insertion, a: RingAttentionAttributes, write_index: ir.Value, tokens: ir.Value | int) -> ir.Value:
    """bool [B,1,1,C]: the slots that a write of T rows from `write_index` on leaves as they are."""
    first = into.op("Unsqueeze", write_index, into.ints(1, 2, 3))
    slots = into.constant(f"{_key(a)}.j", np.arange(a.capacity, dtype=np.int64)[None, None, None])
    if isinstance(tokens, int) and tokens == 1:
        return into.op("Not", into.op("Equal", slots, first))
    behind = into.op("GreaterOrEqual", slots, into.op("Add", first, _count(into, tokens)))
    return into.op("Or", into.op("Less", slots, first), behind)


@dataclass(frozen=True)
class NewRows:
    """Of the new rows of one call, as its queries see them.

    back: int64 [1,1,T,T], how many tokens before a query each row comes, below 0 for those behind it. position: int64 [B,1,1,T] of each
    row. sink: bool [B,1,1,T], whether it is a sink, None without sinks.
    """

    back: ir.Value
    position: ir.Value
    sink: ir.Value | None


def write_new_rows(into: Insertion, a: RingAttentionAttributes, position: ir.Value, tokens: ir.Value | int) -> NewRows:
    zero, one = into.constant("i64.zero", np.array(0, np.int64)), into.constant("i64.one", np.array(1, np.int64))
    rows = into.op("Range", zero, _count(into, tokens), one)
    back = into.op("Sub", into.op("Unsqueeze", rows, into.ints(0, 1, 3)), into.op("Unsqueeze", rows, into.ints(0, 1, 2)))
    positions = into.op("Add", into.op("Unsqueeze", position, into.ints(1, 2, 3)), into.op("Unsqueeze", rows, into.ints(0, 1, 2)))
    sink = into.op("Less", positions, into.constant(f"{_key(a)}.sinks", np.array(a.sinks, np.int64))) if a.sinks else None
    return NewRows(back, positions, sink)


def write_new_validity(into: Insertion, a: RingAttentionAttributes, new: NewRows) -> ir.Value:
    """bool [B,1,T,T], or [1,1,T,T] without sinks: may the query of row t attend to the new row u."""
    near = into.op("Less", new.back, into.constant(f"{_key(a)}.new_window", np.array(a.window, np.int64)))
    if new.sink is not None:
        near = into.op("Or", near, new.sink)
    return into.op("And", into.op("GreaterOrEqual", new.back, into.constant("i64.zero", np.array(0, np.int64))), near)


def write_new_alibi(into: Insertion, a: RingAttentionAttributes, queries: Queries, new: NewRows, additive: ir.Value) -> ir.Value:
    """float32 [B,H,T,T]: the additive mask of the new rows less slope * distance."""
    distance = new.back
    if new.sink is not None and a.policy == "streaming":
        distance = into.op("Where", new.sink, into.op("Sub", _nearest(into, a, queries), new.position), distance)
    return _less_slopes(into, a, distance, additive)


def _nearest(into: Insertion, a: RingAttentionAttributes, queries: Queries) -> ir.Value:
    """int64 [B,1,T,1]: the position that a query has for the sinks."""
    if a.policy != "streaming":
        return queries.position
    return into.op("Min", queries.position, into.constant(f"{_key(a)}.clamp", np.array(a.sinks + a.window - 1, np.int64)))


def _less_slopes(into: Insertion, a: RingAttentionAttributes, distance: ir.Value, additive: ir.Value) -> ir.Value:
    steps = -np.array(a.alibi_slopes, np.float32)[None, :, None, None]
    name = f"alibi.{hashlib.sha256(steps.tobytes()).hexdigest()[:12]}"
    bias = into.op("Mul", into.op("Cast", distance, to=ir.DataType.FLOAT), into.constant(name, steps))
    return into.op("Add", bias, additive)


def _count(into: Insertion, tokens: ir.Value | int) -> ir.Value:
    """T as an int64 scalar value."""
    return into.constant(f"i64.tokens{tokens}", np.array(tokens, np.int64)) if isinstance(tokens, int) else tokens


def _key(a: RingAttentionAttributes) -> str:
    return f"ring{a.sinks}.{a.window}.{a.slots}"
