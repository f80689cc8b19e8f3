"""MatMul with a transposed weight that is also read as it is (a tied embedding) -> Gemm(transB): one copy of it, on disk and in memory."""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value


class TiedHeadToGemm(ir.passes.InPlacePass):
    """Runs after StoreWeightsTransposed, which leaves just these transposes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            transpose = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
            if transpose is None or transpose.op_type != "Transpose":
                continue
            weight, output = transpose.inputs[0], node.outputs[0]
            if weight is None or not weight.is_initializer() or weight.shape is None or output.shape is None or len(weight.shape) != 2:
                continue
            vocab, width = (int(size) for size in weight.shape)  # type: ignore[arg-type]
            batch = output.shape[0]
            if not isinstance(batch, int) or len(output.shape) != 3:
                continue
            into = Insertion(model.graph, node)
            rows = into.op("Reshape", node.inputs[0], into.ints(-1, width))
            product = into.op("Reshape", into.op("Gemm", rows, weight, transB=1), into.ints(batch, -1, vocab))
            product.shape, product.type = output.shape, output.type
            into.commit()
            replace_value(output, product)
            model.graph.remove(node, safe=True)
            if not transpose.outputs[0].uses():
                model.graph.remove(transpose, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)
