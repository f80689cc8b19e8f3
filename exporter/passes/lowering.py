"""What all lowerings of RingAttention share: reading the node, the ring writes, the masks (made once per graph), the sink scores."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import onnx_ir as ir
from sinkring.exporter.node import DOMAIN, OP_TYPE, RingAttentionAttributes
from sinkring.exporter.passes.insertion import Insertion, replace_value
from sinkring.exporter.passes.ring_mask import (
    NewRows,
    Queries,
    write_additive,
    write_alibi,
    write_kept,
    write_new_alibi,
    write_new_rows,
    write_new_validity,
    write_queries,
    write_reached,
    write_validity,
)
from sinkring.runtime.manifest import rows_name

Made = TypeVar("Made")


@dataclass
class RingNode:
    """One RingAttention node and the sizes that its shapes state (T may be a symbolic dimension)."""

    node: ir.Node
    attributes: RingAttentionAttributes
    batch: int
    heads: int
    groups: int
    head_size: int
    tokens: int | None
    float_type: ir.DataType
    cache_type: ir.DataType

    @classmethod
    def read(cls, node: ir.Node) -> "RingNode":
        """Raises PreconditionError for a node whose shapes are not those of the contract."""
        values = {name: attribute.value for name, attribute in node.attributes.items()}
        attributes = RingAttentionAttributes(
            sinks=values["sinks"],
            window=values["window"],
            slots=values["slots"],
            scale=values["scale"],
            policy=values["policy"],
            interleaved=bool(values["interleaved"]),
            softcap=values.get("softcap", 0.0),
            alibi_slopes=tuple(values.get("alibi_slopes", ())),
        )
        query, ring = node.inputs[0], node.inputs[3]
        assert query is not None, "the contract has a query"
        assert ring is not None, "the contract has a key ring"
        if query.shape is None or ring.shape is None or ring.shape[2] != attributes.capacity:
            raise ir.passes.PreconditionError(f"{node.name}: ring shape {ring.shape} does not hold C={attributes.capacity} slots")
        tokens = query.shape[2]
        read = cls(
            node=node,
            attributes=attributes,
            batch=int(ring.shape[0]),  # type: ignore[arg-type]
            heads=int(query.shape[1]),  # type: ignore[arg-type]
            groups=int(ring.shape[1]),  # type: ignore[arg-type]
            head_size=int(query.shape[3]),  # type: ignore[arg-type]
            tokens=tokens if isinstance(tokens, int) else None,
            float_type=query.dtype or ir.DataType.FLOAT,
            cache_type=ring.dtype or ir.DataType.FLOAT,
        )
        slopes = attributes.alibi_slopes
        if slopes and len(slopes) != read.heads:
            raise ir.passes.PreconditionError(
                f"{node.name}: {len(slopes)} alibi_slopes for H={read.heads} query heads; there must be one each"
            )
        if read.has(7) != read.has(8) or (attributes.policy == "streaming" and attributes.sinks and not slopes and not read.has(7)):
            raise ir.passes.PreconditionError(f"{node.name}: the streaming policy needs shift_cos and shift_sin, or alibi_slopes")
        return read

    def has(self, index: int) -> bool:
        """Whether an optional input is there."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def input(self, index: int) -> ir.Value:
        value = self.node.inputs[index]
        assert value is not None
        return value

    @property
    def turns_sinks(self) -> bool:
        """Whether sinks are met by a query of their own; without sinks the two policies are one."""
        return self.attributes.policy == "streaming" and self.attributes.sinks > 0 and self.has(7)

    @property
    def has_sink_logits(self) -> bool:
        return self.has(9)


def ring_nodes(model: ir.Model) -> list[RingNode]:
    return [RingNode.read(node) for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OP_TYPE)]


@dataclass
class Lowering:
    """Carries what is computed once and used by every layer: masks, by geometry and by the values that say where the queries are."""

    graph: ir.Graph
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def validity(self, into: Insertion, ring: RingNode) -> ir.Value:
        """bool [B,1,T,C]."""
        return self._once("validity", ring, lambda: write_validity(into, ring.attributes, self._queries(into, ring)))

    def additive(self, into: Insertion, ring: RingNode) -> ir.Value:
        """float32 [B,1,T,C], or [B,H,T,C] for a node with ALiBi slopes, which are in it."""
        a = ring.attributes
        plain = self._once("additive", ring, lambda: write_additive(into, self.validity(into, ring)))
        if not a.alibi_slopes:
            return plain
        key = ("alibi", a.policy, a.alibi_slopes)
        return self._once(key, ring, lambda: write_alibi(into, a, self._queries(into, ring), plain))

    def reached(self, into: Insertion, ring: RingNode) -> ir.Value:
        """int64 [1]: the first slots of a ring that are all that its queries may need (see `write_reached`)."""
        return self._once(
            "reached", ring, lambda: write_reached(into, ring.attributes, ring.input(5), ring.batch, self._tokens(into, ring))
        )

    def additive_reached(self, into: Insertion, ring: RingNode) -> ir.Value:
        """As `additive`, for those slots only."""
        slopes = ring.attributes.alibi_slopes

        def write() -> ir.Value:
            return into.op("Slice", self.additive(into, ring), into.ints(0), self.reached(into, ring), into.ints(3))

        return self._once(("additive reached", ring.attributes.policy if slopes else "", slopes), ring, write)

    def additive_before(self, into: Insertion, ring: RingNode) -> ir.Value:
        """As `additive`, for a ring that the new rows are not in yet: what they will replace is masked."""
        a = ring.attributes

        def write() -> ir.Value:
            kept = write_kept(into, a, ring.input(6), self._tokens(into, ring))
            return write_additive(into, into.op("And", self.validity(into, ring), kept))

        plain = self._once("additive before", ring, write)
        if not a.alibi_slopes:
            return plain
        key = ("alibi before", a.policy, a.alibi_slopes)
        return self._once(key, ring, lambda: write_alibi(into, a, self._queries(into, ring), plain))

    def additive_new(self, into: Insertion, ring: RingNode) -> ir.Value:
        """float32 [B or 1,1,T,T] for the new rows beside such a ring, or [B,H,T,T] with the slopes of ALiBi in it."""
        a = ring.attributes
        new = self.new_rows(into, ring)
        plain = self._once("additive new", ring, lambda: write_additive(into, write_new_validity(into, a, new)))
        if not a.alibi_slopes:
            return plain
        key = ("alibi new", a.policy, a.alibi_slopes)
        return self._once(key, ring, lambda: write_new_alibi(into, a, self._queries(into, ring), new, plain))

    def additive_with_new(self, into: Insertion, ring: RingNode) -> ir.Value:
        """float32 [B,1 or H,T,C+T]: both side by side."""
        slopes = ring.attributes.alibi_slopes

        def write() -> ir.Value:
            before, new = self.additive_before(into, ring), self.additive_new(into, ring)
            if ring.batch > 1:
                new = into.op("Expand", new, into.ints(ring.batch, 1, 1, 1))
            return into.op("Concat", before, new, axis=3)

        return self._once(("additive with new", ring.attributes.policy if slopes else "", slopes), ring, write)

    def new_rows(self, into: Insertion, ring: RingNode) -> NewRows:
        return self._once("new rows", ring, lambda: write_new_rows(into, ring.attributes, ring.input(5), self._tokens(into, ring)))

    def _queries(self, into: Insertion, ring: RingNode) -> Queries:
        return self._once(
            "queries", ring, lambda: write_queries(into, ring.attributes, ring.input(5), ring.input(6), self._tokens(into, ring))
        )

    def _tokens(self, into: Insertion, ring: RingNode) -> ir.Value | int:
        """T, a number or an int64 scalar value."""
        if ring.tokens is not None:
            return ring.tokens
        return self._once("tokens", ring, lambda: into.op("Squeeze", into.op("Shape", ring.input(0), start=2, end=3)))

    def _once(self, what: Hashable, ring: RingNode, write: Callable[[], Made]) -> Made:
        a = ring.attributes
        key = (what, a.sinks, a.window, a.slots, ring.input(5), ring.input(6))
        if key not in self._made:
            self._made[key] = write()
        made: Made = self._made[key]
        return made


class LowerRingAttention(ir.passes.InPlacePass):
    """What a lowering promises: requires RingAttention nodes of the contract (see RingNode.read), ensures that none is left.

    FORM names the graphs that it makes.
    """

    FORM: ClassVar[str]

    def lower(self, shared: Lowering, ring: RingNode) -> None:
        """Put nodes of the default domain in the place of one RingAttention node."""
        raise NotImplementedError

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        shared = Lowering(model.graph)
        rings = ring_nodes(model)
        for ring in rings:
            self.lower(shared, ring)
        model.opset_imports.pop(DOMAIN, None)
        return ir.passes.PassResult(model, modified=bool(rings))

    def ensures(self, model: ir.Model) -> None:
        left = ring_nodes(model)
        if left:
            raise ir.passes.PostconditionError(f"{len(left)} RingAttention nodes are left")


def write_rings(into: Insertion, ring: RingNode) -> tuple[ir.Value, ir.Value]:
    """Store the new rows: the updated key and value rings. The scatter must stay the only reader of the old ring."""
    updated = []
    for new, old in ((1, 3), (2, 4)):
        rows = ring.input(new)
        if ring.cache_type != ring.float_type:
            rows = into.op("Cast", rows, to=ring.cache_type)
        value = into.op("TensorScatter", ring.input(old), rows, ring.input(6), axis=-2, mode="linear")
        value.shape, value.type = ring.input(old).shape, ring.input(old).type
        updated.append(value)
    return updated[0], updated[1]


def new_rows(into: Insertion, ring: RingNode) -> tuple[ir.Value, ir.Value]:
    """The new key and value rows [B,G,T,D] as a ring will hold them, for the runtime to write: each an output, and no ring touched."""
    rows = []
    for new, old in ((1, 3), (2, 4)):
        value, narrow = ring.input(new), ring.cache_type != ring.float_type
        # An output has a name of its own, whatever else the value is used for.
        row = into.op("Cast", value, to=ring.cache_type) if narrow else into.op("Identity", value)
        row.shape, row.type = value.shape, ring.input(old).type
        rows.append(row)
    return rows[0], rows[1]


def from_cache_type(into: Insertion, ring: RingNode, value: ir.Value) -> ir.Value:
    """What a ring holds, in the type of the query: all arithmetic is done in that."""
    return value if ring.cache_type == ring.float_type else into.op("Cast", value, to=ring.float_type)


def turn_back(into: Insertion, ring: RingNode, query: ir.Value) -> ir.Value:
    """[B,H,T,D]: the query as it meets the sinks."""
    return into.op("RotaryEmbedding", query, ring.input(7), ring.input(8), interleaved=int(ring.attributes.interleaved), **rotary_dim(ring))


def rotary_dim(ring: RingNode) -> dict[str, int]:
    cos = ring.input(7)
    rotary = 2 * int(cos.shape[-1]) if cos.shape is not None else ring.head_size  # type: ignore[arg-type]
    return {} if rotary == ring.head_size else {"rotary_embedding_dim": rotary}


def sink_keys(into: Insertion, ring: RingNode, keys: ir.Value) -> ir.Value:
    """f [B,G,D,S]: the sinks' keys out of the updated ring, as the right side of a product."""
    sinks = into.op("Slice", keys, into.ints(0), into.ints(ring.attributes.sinks), into.ints(2))
    return into.op("Transpose", from_cache_type(into, ring, sinks), perm=[0, 1, 3, 2])


def sink_bias(into: Insertion, ring: RingNode, keys: ir.Value) -> ir.Value:
    """f [B,H,T,C]: what sinks' scores lack when all are computed from the query: scale * (q_sink - q) . k_sink; 0 in the other columns."""
    a = ring.attributes
    turned = into.op("Sub", turn_back(into, ring, ring.input(0)), ring.input(0))
    bias = into.op("MatMul", fold_groups(into, ring, turned), sink_keys(into, ring, keys))
    bias = into.op("Mul", bias, float_constant(into, f"f32.scale{a.scale}", a.scale))
    bias = into.op("Reshape", bias, into.ints(ring.batch, ring.heads, -1, a.sinks))
    return into.op("Pad", bias, into.constant(f"pads{a.slots}", np.array([0, 0, 0, 0, 0, 0, 0, a.slots], dtype=np.int64)))


def cap(into: Insertion, ring: RingNode, capped: ir.Value) -> ir.Value:
    """softcap * tanh(capped): the scores, of scores that are divided by the softcap already."""
    softcap = ring.attributes.softcap
    return into.op("Mul", into.op("Tanh", capped), float_constant(into, f"f32.softcap{softcap}", softcap))


def softmax_beside(into: Insertion, scores: ir.Value, logit: ir.Value) -> ir.Value:
    """The softmax over the last axis of `scores` and one learned sink logit, whose own share goes nowhere. logit [...,1] broadcasts."""
    largest = into.op("Max", into.op("ReduceMax", scores, into.ints(-1)), logit)
    shares = into.op("Exp", into.op("Sub", scores, largest))
    total = into.op("Add", into.op("ReduceSum", shares, into.ints(-1)), into.op("Exp", into.op("Sub", logit, largest)))
    return into.op("Div", shares, total)


def fold_groups(into: Insertion, ring: RingNode, value: ir.Value) -> ir.Value:
    """[B,H,T,D] -> [B,G,(H/G)*T,D]: the query heads that share a KV head become rows of one matrix."""
    return into.op("Reshape", value, into.ints(ring.batch, ring.groups, -1, ring.head_size))


def finish_with_rows(into: Insertion, ring: RingNode, attended: ir.Value, rows: tuple[ir.Value, ir.Value]) -> None:
    """Put the new nodes in the old one's place; the outputs for the updated rings become those for their new rows."""
    into.commit()
    replace_value(ring.node.outputs[0], attended)
    for old, new, cache in zip(ring.node.outputs[1:], rows, (ring.input(3), ring.input(4)), strict=True):
        shape, kind = new.shape, new.type
        old.name = None
        replace_value(old, new)
        new.name, new.shape, new.type = rows_name(str(cache.name)), shape, kind
    into.graph.remove(ring.node, safe=True)


def finish(into: Insertion, ring: RingNode, attended: ir.Value, keys: ir.Value, values: ir.Value) -> None:
    """Put the new nodes in the old one's place."""
    into.commit()
    for old, new in zip(ring.node.outputs, (attended, keys, values), strict=True):
        replace_value(old, new)
    into.graph.remove(ring.node, safe=True)


def float_constant(into: Insertion, name: str, number: float) -> ir.Value:
    return into.constant(name, np.array(number, np.float32))
