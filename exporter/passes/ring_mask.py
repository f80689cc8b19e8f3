"""Which slots a query may attend to, as graph nodes: the only place that writes a mask.

For the query at position q, stored in slot w:   age(j) = (w - j) mod M
    valid(j) = j <= q                            if j < S
               age(j) < W and age(j) <= q - S    otherwise
Ages past q - S are slots that the stream has not reached yet; while q < S no ring slot is valid, whatever its age comes out as.
"""

import numpy as np
import onnx_ir as ir
from sinkring.exporter.node import RingAttentionAttributes
from sinkring.exporter.passes.insertion import Insertion

# Finite, so that adding a score cannot make a NaN; exp of it is exactly 0 next to any real score.
MASKED = -1e30
NEVER = np.iinfo(np.int64).max  # a position no stream reaches


def write_validity(
    into: Insertion, a: RingAttentionAttributes, position: ir.Value, write_index: ir.Value, tokens: ir.Value | int
) -> ir.Value:
    """bool [B,1,T,C]: may token t of row b attend to slot j. `tokens` is T, a number or an int64 scalar value."""
    slots = np.arange(a.capacity, dtype=np.int64)
    key = f"ring{a.sinks}.{a.window}.{a.slots}"
    axes = into.ints(1, 2, 3)

    def per_query(first: ir.Value) -> ir.Value:  # [B] -> [B,1,T,1]: the first token's number, counted up along the chunk
        column = into.op("Unsqueeze", first, axes)
        if isinstance(tokens, int) and tokens == 1:
            return column
        zero, one = into.constant("i64.zero", np.array(0, np.int64)), into.constant("i64.one", np.array(1, np.int64))
        count = into.constant(f"i64.tokens{tokens}", np.array(tokens, np.int64)) if isinstance(tokens, int) else tokens
        offsets = into.op("Range", zero, count, one)
        return into.op("Add", column, into.op("Unsqueeze", offsets, into.ints(0, 1, 3)))

    q, w = per_query(position), per_query(write_index)
    # (M - j) is baked in so that the operand of Mod is not negative wherever its result counts.
    age = into.op(
        "Mod",
        into.op("Add", w, into.constant(f"{key}.slots_minus_j", (a.slots - slots)[None, None, None])),
        into.constant(f"{key}.slots", np.array(a.slots, np.int64)),
    )
    # Both limits are per slot, so that no Where over booleans is needed (ONNX Runtime has none): a sink has no window, the ring no sink.
    window = np.where(slots < a.sinks, 0, a.window)[None, None, None]
    in_window = into.op("Less", age, into.constant(f"{key}.window", window))
    if not a.sinks:
        return into.op("And", in_window, into.op("LessOrEqual", age, q))
    reached = into.op("LessOrEqual", age, into.op("Sub", q, into.constant(f"{key}.sinks", np.array(a.sinks, np.int64))))
    sink_from = np.where(slots < a.sinks, slots, NEVER)[None, None, None]
    sink = into.op("LessOrEqual", into.constant(f"{key}.sink_from", sink_from), q)
    return into.op("Or", sink, into.op("And", in_window, reached))


def write_additive(into: Insertion, validity: ir.Value) -> ir.Value:
    """float [B,1,T,C] to add to scores: 0 where valid, MASKED elsewhere."""
    zero, masked = into.constant("mask.zero", np.array(0, np.float32)), into.constant("mask.masked", np.array(MASKED, np.float32))
    return into.op("Where", validity, zero, masked)
