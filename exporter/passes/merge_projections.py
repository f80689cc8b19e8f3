"""Products of one input with several weights -> one product and a Split: fewer, larger kernels (query, key, value; gate, up)."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value


class MergeProjections(ir.passes.InPlacePass):
    """Weights must be 2-D initializers [in,out] that nothing else reads. Runs after StoreWeightsTransposed; the merged weight is lazy.

    form: of a weight's name, how it will be stored: only weights of one form are merged. By default all are of one.
    """

    def __init__(self, form: Callable[[str], object] = lambda name: None) -> None:
        super().__init__()
        self.form = form

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        by_input: dict[tuple[ir.Value, object], list[ir.Node]] = {}
        for node in graph:
            if node.op_type == "MatMul" and node.inputs[0] is not None and (weight := _weight(node)) is not None:
                by_input.setdefault((node.inputs[0], self.form(str(weight.name))), []).append(node)
        groups = [products for products in by_input.values() if len(products) > 1]
        for products in groups:
            _merge(graph, products)
        return ir.passes.PassResult(model, modified=bool(groups))


def _weight(node: ir.Node) -> ir.Value | None:
    weight = node.inputs[1]
    if weight is None or not weight.is_initializer() or weight.const_value is None or len(weight.uses()) != 1:
        return None
    return weight if len(weight.const_value.shape) == 2 else None


def _merge(graph: ir.Graph, products: list[ir.Node]) -> None:
    weights = [weight for node in products if (weight := _weight(node)) is not None]
    tensors = [weight.const_value for weight in weights]
    rows = int(tensors[0].shape[0])  # type: ignore[union-attr, arg-type]
    columns = [int(tensor.shape[1]) for tensor in tensors]  # type: ignore[union-attr, arg-type]
    dtype = tensors[0].dtype  # type: ignore[union-attr]
    name = "+".join(str(weight.name) for weight in weights)
    shape = ir.Shape((rows, sum(columns)))
    tensor = ir.LazyTensor(
        lambda: ir.tensor(np.concatenate([part.numpy() for part in tensors], axis=1), name=name),  # type: ignore[union-attr]
        dtype=dtype,
        shape=shape,
        name=name,
    )
    merged = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(merged)
    into = Insertion(graph, products[0])
    product = into.op("MatMul", products[0].inputs[0], merged)
    parts = into.ops("Split", len(products), product, into.ints(*columns), axis=-1)
    into.commit()
    for node, part in zip(products, parts, strict=True):
        part.shape, part.type = node.outputs[0].shape, node.outputs[0].type
        replace_value(node.outputs[0], part)
        graph.remove(node, safe=True)
    for weight in weights:
        del graph.initializers[str(weight.name)]
