"""Transpose that moves only axes of length 1 -> Reshape, and Reshape of Reshape -> Reshape: at T = 1 the head layout costs nothing."""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value


class UnitTransposesToReshapes(ir.passes.InPlacePass):
    """Touches only values whose shapes are static."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            source = node.inputs[0] if node.inputs else None
            if source is None or node.op_type not in ("Transpose", "Reshape") or not _static(node.outputs[0]):
                continue
            producer = source.producer()
            over_reshape = producer is not None and producer.op_type == "Reshape"
            if node.op_type == "Transpose" and not _moves_only_units(node):
                continue
            if node.op_type == "Reshape" and not over_reshape:
                continue
            into = Insertion(model.graph, node)
            shape = into.ints(*_sizes(node.outputs[0]))
            flat = into.op("Reshape", producer.inputs[0] if over_reshape and producer is not None else source, shape)
            flat.shape, flat.type = node.outputs[0].shape, node.outputs[0].type
            into.commit()
            replace_value(node.outputs[0], flat)
            model.graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _static(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.is_static()


def _moves_only_units(node: ir.Node) -> bool:
    source = node.inputs[0]
    if source is None or not _static(source) or source.is_initializer():
        return False
    shape = _sizes(source)
    longer = [axis for axis in node.attributes["perm"].as_ints() if shape[axis] != 1]
    return longer == sorted(longer)


def _sizes(value: ir.Value) -> list[int]:
    assert value.shape is not None, "only values of static shape get here"
    return [int(size) for size in value.shape]  # type: ignore[arg-type]
