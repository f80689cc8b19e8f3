"""Split of a joint projection and a Reshape and Transpose of each part -> one Reshape, one Transpose, one Split.

Query, key and value heads are rows of one matrix [B,T,(H+2G)*D]: they can be laid out [B,H+2G,T,D] at once, and be told apart by the head.
"""

from dataclasses import dataclass

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value

BY_HEAD = (0, 2, 1, 3)


@dataclass(frozen=True)
class _Part:
    """One output of a Split as heads: [B,T,heads*size] -> [B,heads,T,size]. by what two nodes."""

    batch: int
    heads: int
    size: int
    reshape: ir.Node
    transpose: ir.Node


class SplitHeadsTogether(ir.passes.InPlacePass):
    """Touches a Split along the last axis whose parts are all laid out by heads of one size, and read in no other way."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            parts = [_part(value) for value in node.outputs] if node.op_type == "Split" else []
            whole = [part for part in parts if part is not None]
            if not whole or len(whole) < len(parts) or len({(part.batch, part.size) for part in whole}) > 1:
                continue
            _split_once(model.graph, node, whole)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _part(value: ir.Value) -> _Part | None:
    reshape = _only_reader(value, "Reshape")
    transpose = _only_reader(reshape.outputs[0], "Transpose") if reshape is not None else None
    if reshape is None or transpose is None or tuple(transpose.attributes["perm"].as_ints()) != BY_HEAD:
        return None
    columns, heads = value.shape, reshape.outputs[0].shape
    if columns is None or heads is None or len(columns) != 3 or len(heads) != 4:
        return None
    batch, _, count, size = heads
    # A Reshape that moves numbers between tokens is another one.
    if (
        columns[0] != batch
        or not (isinstance(batch, int) and isinstance(count, int) and isinstance(size, int))
        or columns[2] != count * size
    ):
        return None
    return _Part(batch, count, size, reshape, transpose)


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    reader, place = uses[0]
    return reader if (reader.op_type, place) == (op_type, 0) else None


def _split_once(graph: ir.Graph, split: ir.Node, parts: list[_Part]) -> None:
    into = Insertion(graph, split)
    count = [part.heads for part in parts]
    rows = into.op("Reshape", split.inputs[0], into.ints(parts[0].batch, -1, sum(count), parts[0].size))
    by_head = into.op("Transpose", rows, perm=BY_HEAD)
    found = into.ops("Split", len(parts), by_head, into.ints(*count), axis=1)
    into.commit()
    for part, value in zip(parts, found, strict=True):
        old = part.transpose.outputs[0]
        value.shape, value.type = old.shape, old.type
        replace_value(old, value)
        graph.remove([part.transpose, part.reshape], safe=True)
    graph.remove(split, safe=True)
