"""Writing nodes into an ONNX graph in front of an existing node."""

from collections.abc import Sequence
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

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer; the name stands for the content, so a second call with the same name gives the first one's value."""
        if name in self.graph.initializers:
            return self.graph.initializers[name]
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
