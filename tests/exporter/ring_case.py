"""One RingAttention call with everything about it known, for tests of the node and of its lowerings.

A stream is made of random queries, keys and values that are not rotated. From them come, by separate roads, the inputs of the node and what
must come out of it: plain attention in float64 over the tokens that RingGeometry.attended names.
"""

from dataclasses import dataclass
from functools import cache

import mpmath  # type: ignore[import-untyped]  # it ships no types
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from sinkring.exporter.node import DOMAIN, OP_TYPE, RingAttentionAttributes
from sinkring.runtime.manifest import StateTensor
from sinkring.runtime.ring import RingGeometry

HEAD_SIZE = 8
# What a slot that nobody may read holds. The key is huge or, so that its score cannot come out as a huge negative one, zero.
POISON_KEY, POISON_VALUE = 1e9, 1e30
# The same for float16 caches: a key whose score, masked, float16 can hold, and the largest finite value.
NARROW_POISON_KEY, NARROW_POISON_VALUE = 1e3, 6e4
NODE_INPUTS = ("query", "key", "value", "key_ring", "value_ring", "position", "write_index", "shift_cos", "shift_sin", "sink_logits")
OUTPUTS = ("attended", "key_ring.updated", "value_ring.updated")


@dataclass(frozen=True)
class RingCase:
    """What a graph of one node fixes. tokens None: T is a symbolic dimension."""

    sinks: int
    window: int
    slack: int
    tokens: int | None
    batch: int = 1
    heads: int = 4
    groups: int = 2
    policy: str = "native"
    interleaved: bool = False
    scale: float = 0.35
    rotary: int = HEAD_SIZE
    softcap: float = 0.0
    sink_logits: bool = False
    slopes: tuple[float, ...] = ()
    cache_dtype: str = "float32"

    @property
    def geometry(self) -> RingGeometry:
        return RingGeometry(self.sinks, self.window, self.window + self.slack)

    @property
    def attributes(self) -> RingAttentionAttributes:
        positions = (self.policy, self.interleaved, self.softcap, self.slopes)
        return RingAttentionAttributes(self.sinks, self.window, self.geometry.slots, self.scale, *positions)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs that the node has; without a rotation there is none to turn back."""
        shift = NODE_INPUTS[7:9] if self.policy == "streaming" and self.rotary else ()
        return (*NODE_INPUTS[:7], *shift, *(NODE_INPUTS[9:] if self.sink_logits else ()))

    @property
    def poison(self) -> tuple[float, float]:
        return (POISON_KEY, POISON_VALUE) if self.cache_dtype == "float32" else (NARROW_POISON_KEY, NARROW_POISON_VALUE)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The rings as a manifest lists them."""
        shape = (self.batch, self.groups, self.geometry.capacity, HEAD_SIZE)
        names = NODE_INPUTS[3:5]
        return tuple(StateTensor(name, f"{name}.updated", "ring", shape, self.cache_dtype, 0, 0.0, ring=0, layer=0) for name in names)

    def starts(self, tokens: int) -> list[int]:
        """Positions at which a chunk of `tokens` fits in front of the ring's end: in the sinks, around two wraps, and at 2**40."""
        ring, wrap = self.geometry, self.geometry.capacity
        wanted = [0, self.sinks - 1, self.sinks, wrap - tokens, wrap, wrap + 1, wrap + ring.slots - tokens, wrap + ring.slots, 1 << 40]
        found: list[int] = []
        for position in wanted:
            while position >= 0 and ring.room(position) < tokens:
                position += 1
            if position >= 0 and position not in found:
                found.append(position)
        return found


def ring_model(case: RingCase) -> ir.Model:
    """The graph of one RingAttention node."""
    tokens: int | str = case.tokens or "T"
    b, h, g, c, d = case.batch, case.heads, case.groups, case.geometry.capacity, HEAD_SIZE
    shapes: dict[str, tuple[int | str, ...]] = {
        "query": (b, h, tokens, d),
        "key": (b, g, tokens, d),
        "value": (b, g, tokens, d),
        "key_ring": (b, g, c, d),
        "value_ring": (b, g, c, d),
        "position": (b,),
        "write_index": (b,),
        "shift_cos": (b, tokens, case.rotary // 2),
        "shift_sin": (b, tokens, case.rotary // 2),
        "sink_logits": (h,),
    }
    inputs = {name: _value(name, shapes[name], case) for name in case.input_names}
    outputs = [_value(name, shapes[like], case) for name, like in zip(OUTPUTS, ("query", "key_ring", "value_ring"), strict=True)]
    attributes: dict[str, int | float | str | tuple[float, ...]] = {
        "sinks": case.sinks,
        "window": case.window,
        "slots": case.geometry.slots,
        "scale": case.scale,
        "interleaved": int(case.interleaved),
        "policy": case.policy,
    }
    # As a front end does: what is absent is not written, and an absent input is only written in front of one that is there.
    if case.softcap:
        attributes["softcap"] = case.softcap
    if case.slopes:
        attributes["alibi_slopes"] = case.slopes
    last = max(NODE_INPUTS.index(name) for name in inputs)
    node = ir.Node(
        DOMAIN,
        OP_TYPE,
        [inputs.get(name) for name in NODE_INPUTS[: last + 1]],
        ir.convenience.convert_attributes(attributes),
        outputs=outputs,
        name="attention",
    )
    graph = ir.Graph(list(inputs.values()), outputs, nodes=[node], opset_imports={"": 24, DOMAIN: 1}, name="one_node")
    return ir.Model(graph, ir_version=10)


def session(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Call:
    """Inputs of the node by name, and its outputs as plain attention gives them: attended [B,H,T,D], and both rings with the new rows."""

    inputs: dict[str, np.ndarray]
    attended: np.ndarray
    key_ring: np.ndarray
    value_ring: np.ndarray

    def error(self, outputs: list[np.ndarray]) -> float:
        """Largest difference in `attended`. Asserts that the rings came out bit for bit."""
        np.testing.assert_array_equal(outputs[1], self.key_ring)
        np.testing.assert_array_equal(outputs[2], self.value_ring)
        assert outputs[0].shape == self.attended.shape
        return float(np.abs(outputs[0] - self.attended).max())


def make_call(case: RingCase, starts: list[int], tokens: int, seed: int = 0) -> Call:
    """A call in which row b of the batch feeds `tokens` tokens from position starts[b] on."""
    rows = [_row(case, start, tokens, np.random.default_rng([seed, row]), _sink_logits(case, seed)) for row, start in enumerate(starts)]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    # Of the size of the scores, so that its share is neither all nor nothing.
    stacked["sink_logits"] = _sink_logits(case, seed)
    expected = {name: stacked.pop(f"expected.{name}") for name in ("attended", "key_ring", "value_ring")}
    return Call({name: stacked[name] for name in case.input_names}, **expected)


def _sink_logits(case: RingCase, seed: int) -> np.ndarray:
    return (np.random.default_rng([seed, 99]).normal(size=case.heads) * 3 + 3).astype(np.float32)


def _row(case: RingCase, start: int, tokens: int, random: np.random.Generator, sink_logits: np.ndarray) -> dict[str, np.ndarray]:
    ring, groups, heads = case.geometry, case.groups, case.heads
    queries = range(start, start + tokens)
    seen = sorted({token for query in queries for token in ring.attended(query)})
    # Scores have a deviation of about 3, so that attention is neither flat nor a single token.
    query = {token: random.normal(size=(heads, HEAD_SIZE)) * 2 for token in queries}
    key = {token: random.normal(size=(groups, HEAD_SIZE)) * 2 for token in seen}
    value = {token: random.normal(size=(groups, HEAD_SIZE)) for token in seen}

    huge = (random.random(groups) < 0.5) & (np.arange(groups) != groups - 1) if groups > 1 else random.random(1) < 0.5
    poison_key, poison_value = case.poison
    key_ring = (random.choice([-poison_key, poison_key], (groups, ring.capacity, HEAD_SIZE)) * huge[:, None, None]).astype(case.cache_dtype)
    value_ring = np.full_like(key_ring, poison_value)
    for token in seen:
        if token < start:
            key_ring[:, ring.slot(token)] = turn(case, key[token], token)
            value_ring[:, ring.slot(token)] = value[token]
    new_keys = np.stack([turn(case, key[token], token) for token in queries], axis=1).astype(np.float32)
    new_values = np.stack([value[token] for token in queries], axis=1).astype(np.float32)
    updated_keys, updated_values = key_ring.copy(), value_ring.copy()
    for index, token in enumerate(queries):
        updated_keys[:, ring.slot(token)] = new_keys[:, index]
        updated_values[:, ring.slot(token)] = new_values[:, index]

    back = [max(0, token - (ring.sinks_tokens + ring.window_tokens - 1)) for token in queries]
    shift = np.array([cos_sin(tuple(-turned for turned in angles(case.rotary, distance))) for distance in back])
    return {
        "query": np.stack([turn(case, query[token], token) for token in queries], axis=1).astype(np.float32),
        "key": new_keys,
        "value": new_values,
        "key_ring": key_ring,
        "value_ring": value_ring,
        "position": np.array(start),
        "write_index": np.array(ring.slot(start)),
        "shift_cos": shift[:, 0].astype(np.float32),
        "shift_sin": shift[:, 1].astype(np.float32),
        "expected.attended": np.stack([_attend(case, query[token], token, key, value, sink_logits) for token in queries], axis=1),
        "expected.key_ring": updated_keys,
        "expected.value_ring": updated_values,
    }


def _attend(
    case: RingCase, query: np.ndarray, position: int, key: dict[int, np.ndarray], value: dict[int, np.ndarray], sink_logits: np.ndarray
) -> np.ndarray:
    """Plain attention [H,D] of one query to A(position); streaming counts positions in the cache, as StreamingLLM does."""
    tokens = case.geometry.attended(position)
    places = list(range(len(tokens))) if case.policy == "streaming" else tokens
    turned_query = turn(case, query, places[-1])
    out = []
    for head in range(case.heads):
        group = head // (case.heads // case.groups)
        keys = np.stack([turn(case, key[token], place)[group] for token, place in zip(tokens, places, strict=True)])
        scores = keys @ turned_query[head] * case.scale
        if case.softcap:
            scores = np.tanh(scores / case.softcap) * case.softcap
        if case.slopes:
            scores = scores + case.slopes[head] * np.array([place - places[-1] for place in places], float)
        top = scores.max()
        weights = np.exp(scores - top)
        total = weights.sum() + (np.exp(float(sink_logits[head]) - top) if case.sink_logits else 0.0)
        out.append(weights / total @ np.stack([value[token][group] for token in tokens]))
    return np.stack(out)


def turn(case: RingCase, x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of x [...,D] for `position`, in float64, each pair as a complex number."""
    cos, sin = cos_sin(angles(case.rotary, position))
    out = x.copy()
    half = case.rotary // 2
    first, second = (slice(0, case.rotary, 2), slice(1, case.rotary, 2)) if case.interleaved else (slice(0, half), slice(half, case.rotary))
    turned = (x[..., first] + 1j * x[..., second]) * (cos + 1j * sin)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@cache
def angles(rotary: int, position: int) -> tuple[float, ...]:
    """Radians, reduced to one turn without loss, of base 100."""
    with mpmath.workdps(50):
        turned = [position * mpmath.mpf(100) ** (-mpmath.mpf(2 * i) / rotary) for i in range(rotary // 2)]
        return tuple(float(mpmath.fmod(angle, 2 * mpmath.pi)) for angle in turned)


def cos_sin(radians: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    return np.cos(radians), np.sin(radians)


def _value(name: str, shape: tuple[int | str, ...], case: RingCase) -> ir.Value:
    kind = ir.DataType.INT64 if name in ("position", "write_index") else ir.DataType.FLOAT
    if "ring" in name:
        kind = ir.DataType[case.cache_dtype.upper().removesuffix("32")]
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
