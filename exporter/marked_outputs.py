"""Marked outputs: values inside two decode graphs that stand for the same thing, made outputs, so that where two runs part can be seen.

Two forms of one graph share what the front end traced and differ in what was lowered. Values pair up by the tracer's names, and by the
nodes that both forms have, with the same weights: what goes into an output projection is the attention's result in either form.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

# The first number between names in a weight's name is its layer: model.layers.3.mlp..., transformer.h.3.attn...; constants count otherwise.
_LAYER = re.compile(r"(?:^|\.)[A-Za-z_]+\.(\d+)\.[A-Za-z_]")
# What passes call values that have no name in the traced model: each form counts by itself.
_COUNTED = re.compile(r"val_\d+")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Mark:
    """One value under its name in each of two graphs; node makes it in the first. layer: -1 before the layers, L (how many) after."""

    node: str
    layer: int
    first: str
    second: str


def find_marks(first: onnx.ModelProto, second: onnx.ModelProto, states: Mapping[str, int], layers: int) -> tuple[Mark, ...]:
    """All float values that both graphs have, in the order in which the first makes them. states: layer of each state by input name."""
    one, other = ir.serde.deserialize_model(first).graph, ir.serde.deserialize_model(second).graph
    pairs = _pairs(one, other)
    where = _layers(one, states, layers)
    return tuple(
        Mark(node.name or node.op_type, where[value], value.name or "", pairs[value.name or ""])
        for node in one
        for value in node.outputs
        if value.name in pairs and value.dtype in _FLOATS
    )


def last_of_each_layer(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """The hidden state that leaves each layer: few enough outputs to leave an engine its fused kernels."""
    return tuple({mark.layer: mark for mark in marks}.values())


def mark_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a graph, its weights where they lie, with these values as further outputs."""
    marked = ir.serde.deserialize_model(model)
    values = {value.name: value for node in marked.graph for value in node.outputs}
    present = {value.name for value in marked.graph.outputs}
    marked.graph.outputs.extend(values[name] for name in dict.fromkeys(names) if name not in present)
    return ir.serde.serialize_model(marked)


def _pairs(one: ir.Graph, other: ir.Graph) -> dict[str, str]:
    """Value of the first graph -> the same of the other."""
    if [_shape(node) for node in one] == [_shape(node) for node in other]:
        return {name: name for node in one for name in _names(node.outputs)}
    theirs = {node.name: node for node in other}
    produced = {name for node in other for name in _names(node.outputs)}
    pairs: dict[str, str] = {}
    for node in one:
        pairs |= {name: name for name in _names(node.outputs) if name in produced and not _COUNTED.fullmatch(name)}
        twin = theirs.get(node.name)
        if twin is None or node.op_type != twin.op_type or not _weights(node) or _weights(node) != _weights(twin):
            continue
        pairs |= dict(zip(_names(node.outputs), _names(twin.outputs), strict=True))
        for mine, its in zip(node.inputs, twin.inputs, strict=True):
            if mine is not None and its is not None and mine.producer() and its.producer():
                pairs[mine.name or ""] = its.name or ""
    return pairs


def _shape(node: ir.Node) -> tuple[object, ...]:
    return node.name, node.op_type, len(node.inputs), *_names(node.outputs)


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


def _weights(node: ir.Node) -> list[str]:
    return [value.name or "" for value in node.inputs if value is not None and value.is_initializer() and _LAYER.search(value.name or "")]


def _layers(graph: ir.Graph, states: Mapping[str, int], layers: int) -> dict[ir.Value, int]:
    """The layer of each value: that of the weights and states its node reads, else the deepest of what goes into the node."""
    where: dict[ir.Value, int] = {}
    for node in graph:
        own, before = [-1], -1
        for value in node.inputs:
            if value is None:
                continue
            name = value.name or ""
            if name in states:
                own.append(states[name])
            elif value.is_initializer():
                found = _LAYER.search(name)
                if found and int(found[1]) < layers:
                    own.append(int(found[1]))
                elif _is_matrix_or_norm(value):
                    own.append(layers)
            else:
                before = max(before, where.get(value, -1))
        # A weight of no layer comes before all of them, or after.
        layer = max(before, *(mine for mine in own if mine < layers)) if before < 0 or max(own) < layers else layers
        for value in node.outputs:
            where[value] = layer
    return where


def _is_matrix_or_norm(value: ir.Value) -> bool:
    """A weight, not one of the numbers that a lowering needs."""
    return value.dtype in _FLOATS and value.shape is not None and value.shape.numpy() != () and (value.name or "").endswith(_ENDS)


_ENDS = (".weight", ".weight.transposed", ".bias")
