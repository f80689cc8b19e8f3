"""A graph that computes in bfloat16 -> the same nodes for a CPU, whose ONNX Runtime moves bfloat16 and has no arithmetic for it.

Each node that computes gets its bfloat16 inputs cast to float32, computes in that, and has its results rounded back to bfloat16, once, as
hardware does that multiplies bfloat16 and adds in float32. Nothing else changes: taking these casts out again gives the graph as it was.
"""

import onnx_ir as ir

# What only moves numbers or changes their type: ONNX Runtime has these for bfloat16 on a CPU.
MOVES = frozenset(
    [
        "Cast",
        "Concat",
        "Gather",
        "GatherND",
        "Identity",
        "Pad",
        "Reshape",
        "Shape",
        "Slice",
        "Split",
        "Squeeze",
        "TensorScatter",
        "Transpose",
        "Unsqueeze",
    ]
)
# Ends of the names of what is put in.
WIDENED, ROUNDED, WIDE = ".widened", ".rounded", ".wide"


class WidenBfloat16Arithmetic(ir.passes.InPlacePass):
    """Ensures that no node but those of MOVES reads or writes bfloat16. The graph's inputs, outputs and weights keep their types."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        computing = [node for node in model.graph if computes_in_bfloat16(node)]
        for node in computing:
            _widen_inputs(model.graph, node)
            for index, value in enumerate(list(node.outputs)):
                if value.dtype == ir.DataType.BFLOAT16:
                    _round_output(model.graph, node, index, value)
        return ir.passes.PassResult(model, modified=bool(computing))

    def ensures(self, model: ir.Model) -> None:
        if left := [node for node in model.graph if computes_in_bfloat16(node)]:
            raise ir.passes.PostconditionError(f"{len(left)} nodes still compute in bfloat16, the first is {left[0].name}")


def computes_in_bfloat16(node: ir.Node) -> bool:
    values = (*(value for value in node.inputs if value is not None), *node.outputs)
    return node.op_type not in MOVES and any(value.dtype == ir.DataType.BFLOAT16 for value in values)


def _widen_inputs(graph: ir.Graph, node: ir.Node) -> None:
    widened: dict[ir.Value, ir.Value] = {}
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype != ir.DataType.BFLOAT16:
            continue
        if value not in widened:
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"{node.name}.{index}{WIDENED}")
            (out,) = cast.outputs
            out.name, out.shape, out.type = f"{node.name}.{index}{WIDENED}", value.shape, ir.TensorType(ir.DataType.FLOAT)
            graph.insert_before(node, cast)
            widened[value] = out
        node.replace_input_with(index, widened[value])


def _round_output(graph: ir.Graph, node: ir.Node, index: int, value: ir.Value) -> None:
    """The rounded value takes the name and the place of the node's own result."""
    name = value.name
    cast = ir.node("Cast", [value], {"to": ir.DataType.BFLOAT16}, name=f"{node.name}.{index}{ROUNDED}")
    (rounded,) = cast.outputs
    rounded.shape, rounded.type = value.shape, ir.TensorType(ir.DataType.BFLOAT16)
    users = [(user, at) for user, at in value.uses() if user is not cast]
    graph.insert_after(node, cast)
    for user, at in users:
        user.replace_input_with(at, rounded)
    for at, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[at] = rounded
    value.name, value.type = f"{name}{WIDE}", ir.TensorType(ir.DataType.FLOAT)
    rounded.name = name
