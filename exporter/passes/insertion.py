"""Writing nodes into an ONNX graph in front of an existing node."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape


class Insertion:
    """Collects new nodes and constants; `commit` puts them before `anchor`. Constants of equal name are made once per graph."""

    def __init__(self, graph: ir.Graph, anchor: ir.Node) -> None:
        self.graph, self.anchor = graph, anchor
        self.tape = Tape()

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """One node of the default domain with one output."""
        return self.tape.op(op_type, list(inputs), attributes or None)

    def op_of(self, domain: str, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """One node of another domain, with one output."""
        return self.tape.op(op_type, list(inputs), attributes or None, domain=domain)

    def ops(self, op_type: str, outputs: int, *inputs: ir.Value | None, **attributes: Any) -> Sequence[ir.Value]:
        return self.tape.op_multi_out(op_type, list(inputs), attributes or None, num_outputs=outputs)

    def either(self, condition: ir.Value, **branches: Callable[["Insertion"], ir.Value]) -> ir.Value:
        """One If of two branches, each named and written by its function: the first where `condition` (bool, one element) holds.

        Each function gets an Insertion for the nodes of its branch, which may read all values of the graph that were made before.
        """
        graphs = []
        for name, write in branches.items():
            inside = Insertion(self.graph, self.anchor)
            output = write(inside)
            for index, node in enumerate(inside.tape.nodes):
                # A graph names its own nodes and values as they come in, by numbers that it may have given in another branch.
                node.name = f"{self.anchor.outputs[0].name}.{name}.{index}"
                for place, value in enumerate(node.outputs):
                    value.name = f"{node.name}.{place}"
            graphs.append(ir.Graph([], [output], nodes=inside.tape.nodes, name=name))
        holds, fails = graphs
        return self.op("If", condition, then_branch=holds, else_branch=fails)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer; the name stands for the content, so a second call with the same name gives the first one's value."""
        if name in self.graph.initializers:
            made, kind = self.graph.initializers[name], ir.DataType.from_numpy(array.dtype)
            assert (made.shape, made.dtype) == (ir.Shape(array.shape), kind), f"{name} stands for two contents"
            return made
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
        value.const_value = ir.tensor(array, name=name)
        self.graph.register_initializer(value)
        return value

    def ints(self, *numbers: int) -> ir.Value:
        """An int64 [n] constant, for shapes and axes."""
        return self.constant("i64." + ".".join(map(str, numbers)), np.array(numbers, dtype=np.int64))

    def commit(self) -> None:
        self.graph.insert_before(self.anchor, self.tape.nodes)
        self.tape = Tape()


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let every user of `old`, graph outputs included, use `new`; a graph output keeps its name, type and shape."""
    if old.is_graph_output():
        name, new.type, new.shape = old.name, old.type, old.shape
        old.name = None
        new.name = name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
