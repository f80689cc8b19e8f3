"""Transpose(weight) -> the weight stored transposed, so that no runtime folds a second copy of it into memory when it loads.

The new tensor is lazy: the transposed bytes exist only while they are written.
"""

import onnx_ir as ir

# What the name of a weight that is stored transposed has more than the model's own.
SUFFIX = ".transposed"


class StoreWeightsTransposed(ir.passes.InPlacePass):
    """A weight that is also read untransposed (a tied embedding) is left alone: storing it twice would cost more than it saves."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            weight = node.inputs[0] if _swaps(node) else None
            if weight is None or not weight.is_initializer():
                continue
            assert weight.shape is not None, f"{weight.name}: an initializer has a shape"
            if len(weight.shape) != 2 or not all(_swaps(user) for user, _ in weight.uses()):
                continue
            stored = _transposed(weight)
            if stored.name not in graph.initializers:
                graph.register_initializer(stored)
            ir.convenience.replace_all_uses_with(node.outputs[0], graph.initializers[stored.name or ""])
            graph.remove(node, safe=True)
            modified = True
        for name in [name for name, value in graph.initializers.items() if not value.uses() and not value.is_graph_output()]:
            del graph.initializers[name]
        return ir.passes.PassResult(model, modified=modified)


def _swaps(node: ir.Node) -> bool:
    """Whether it is a Transpose of two axes that swaps them; torch writes some that leave them."""
    if node.op_type != "Transpose":
        return False
    order = node.attributes.get("perm")
    return order is None or list(order.as_ints()) == [1, 0]


def _transposed(weight: ir.Value) -> ir.Value:
    source = weight.const_value
    assert source is not None
    rows, columns = (int(size) for size in source.shape)  # type: ignore[arg-type]
    name = f"{weight.name}{SUFFIX}"
    shape = ir.Shape((columns, rows))
    tensor = ir.LazyTensor(lambda: ir.tensor(source.numpy().T.copy(), name=name), dtype=source.dtype, shape=shape, name=name)
    return ir.Value(name=name, shape=shape, type=ir.TensorType(source.dtype), const_value=tensor)
