"""The tail of a graph: its nodes from one on, fed with the values that the nodes before it made.

A weight or a state that is first read in the tail changes nothing before it, so a run of the tail with the values of a run of the whole
gives the logits that the whole would give. Of a large vocabulary some logits are enough where they change; where they do not, others may.
"""

from collections.abc import Iterable, Mapping
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Reading a weight takes longest in a step of one token. A tail begins after each so many bytes of weights, but not more often than that.
_BYTES_BETWEEN = 16 << 20
MOST_TAILS = 16
# They read some rows of a table only.
_LOOK_UPS = ("Gather", "GatherBlockQuantized")
# They change no number, and leave the numbers in their order.
_MOVES = ("Identity", "Reshape", "Squeeze", "Unsqueeze")
# Logits that stand for all of them, and how many there must be at least.
SOME, _MANY = 512, 4096
SOME_LOGITS = "some_logits"


def tail_starts(model: onnx.ModelProto, weights: Mapping[str, TensorProto]) -> list[int]:
    """Nodes, by index, at which tails begin that have about equal shares of the weights, 0 among them; none in a graph that is soon run."""
    read = [0 if node.op_type in _LOOK_UPS else sum(_bytes(weights[n]) for n in node.input if n in weights) for node in model.graph.node]
    share = max(_BYTES_BETWEEN, sum(read) // MOST_TAILS)
    starts, since = [], 0
    for index, count in enumerate(read):
        if since >= share and any(read[index:]):
            starts.append(index)
            since = 0
        since += count
    return starts and [0, *starts]


def first_readers(model: onnx.ModelProto) -> dict[str, int]:
    """Of each value that is read, the index of the first node that does."""
    return {name: index for index, node in reversed(list(enumerate(model.graph.node))) for name in _reads(node)}


def crossing_values(model: onnx.ModelProto, start: int) -> list[str]:
    """What the nodes from `start` on read of those before it, in the order in which it is made."""
    read = {name for node in model.graph.node[start:] for name in _reads(node)}
    return [name for node in model.graph.node[:start] for name in node.output if name in read]


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of which these values are outputs, too."""
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    present = {value.name for value in marked.graph.output}
    marked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in present)
    return marked


def with_some_logits(model: onnx.ModelProto, logits: str) -> onnx.ModelProto | None:
    """A copy that also makes SOME_LOGITS: of each row of the `logits` the first SOME. None of a graph that scales or caps what its head
    makes, or whose head is no product with a plain matrix of many columns.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    head = makers[logits]
    while head.op_type in _MOVES and head.input[0] in makers:
        head = makers[head.input[0]]
    if head.op_type not in ("Gemm", "MatMul") or len(head.input) != 2:
        return None
    weight = next((tensor for tensor in model.graph.initializer if tensor.name == head.input[1]), None)
    axis = 0 if any(attribute.name == "transB" and attribute.i for attribute in head.attribute) else 1
    if weight is None or len(weight.dims) != 2 or weight.dims[axis] < _MANY:
        return None
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    bounds = {f"{SOME_LOGITS}.{name}": [value] for name, value in (("start", 0), ("stop", SOME), ("axis", axis))}
    marked.graph.initializer.extend(numpy_helper.from_array(np.array(value, np.int64), name) for name, value in bounds.items())
    product = marked.graph.node.add()
    product.CopyFrom(head)
    product.name, product.input[1], product.output[0] = SOME_LOGITS, f"{SOME_LOGITS}.weight", SOME_LOGITS
    cut = helper.make_node("Slice", [weight.name, *bounds], [f"{SOME_LOGITS}.weight"], f"{SOME_LOGITS}.weight")
    marked.graph.node.insert(len(marked.graph.node) - 1, cut)
    marked.graph.output.append(onnx.ValueInfoProto(name=SOME_LOGITS))
    return marked


def tail_of(model: onnx.ModelProto, start: int, crossing: Mapping[str, tuple[int, tuple[int, ...]]], output: str) -> onnx.ModelProto:
    """Those of the nodes from `start` on that `output` is made by.

    crossing: element type and shape of each of the crossing values, which are inputs.
    """
    tail = onnx.ModelProto()
    tail.CopyFrom(model)
    graph = tail.graph
    kept: list[onnx.NodeProto] = []
    needed = {output}
    for node in reversed(model.graph.node[start:]):
        if not needed.isdisjoint(node.output):
            kept.insert(0, node)
            needed.update(_reads(node))
    del graph.node[:]
    graph.node.extend(kept)
    read = {name for node in kept for name in _reads(node)}
    for field, used in ((graph.initializer, read), (graph.output, {output})):
        wanted = [entry for entry in field if entry.name in used]
        del field[:]
        field.extend(wanted)
    made = {name for node in kept for name in node.output}
    shapes = [entry for entry in graph.value_info if entry.name in made]
    del graph.value_info[:]
    graph.value_info.extend(shapes)
    graph.input.extend(helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in crossing.items())
    return tail


def _reads(node: onnx.NodeProto) -> Iterable[str]:
    """Names of its inputs, and of all that graphs within it read, some of which may be their own."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                yield from _reads(inner)


def _bytes(tensor: TensorProto) -> int:
    return prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
