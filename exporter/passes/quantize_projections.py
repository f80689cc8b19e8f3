"""MatMul, or Gemm of a tied head, with a weight that is stored in blocks -> MatMulNBits.

The operator has no input for a block's residual. Its share of a product is the sum of the block's 32 inputs times the residual, so the
sums are more inputs and the residuals more weights in the same product, where one of their own takes a ninth of a step. They get two digits
of as many bits as the weights have, which is 8 bits for a residual.
"""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value
from sinkring.exporter.passes.store_in_blocks import CONTRIB, StoreInBlocks
from sinkring.exporter.passes.transpose_weights import SUFFIX
from sinkring.exporter.quantize import BLOCK, BlockMatrix, copies_of_sums, stack

# Inputs are rounded to int8 block by block: without it the kernels of ONNX Runtime are many times slower.
ACCURACY_LEVEL = 4
# What the name of such weights ends in, for who reads them.
RESIDUALS_AS_WEIGHTS = ".and_residuals"


class QuantizeProjections(StoreInBlocks):
    """Runs after MergeProjections, which joins names by `+`."""

    WEIGHT = 1
    WHAT = "products with quantized weights"

    def matrix(self, node: ir.Node) -> BlockMatrix | None:
        weight = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
        if weight is None or not weight.is_initializer():
            return None
        names = str(weight.name).split("+")
        if node.op_type == "MatMul":
            # Blocks lie along the inputs, so it is the weight as the model has it that is stored.
            names = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        found = [self.matrices[name] for name in names if name in self.matrices]
        if not found:
            return None
        assert len(found) == len(names), f"{weight.name}: merged weights are all quantized or none is"
        return stack(found)

    def replace(self, graph: ir.Graph, node: ir.Node, name: str, matrix: BlockMatrix) -> None:
        into = Insertion(graph, node)
        inputs, output = node.inputs[0], node.outputs[0]
        # Of both factors, and the weight's is always known: what earlier passes put in has no type yet.
        dtype = node.inputs[1].dtype if node.inputs[1] is not None else None
        narrow = dtype not in (None, ir.DataType.FLOAT)
        if narrow and inputs is not None:
            shape, inputs = inputs.shape, into.op("Cast", inputs, to=ir.DataType.FLOAT)
            inputs.shape, inputs.type = shape, ir.TensorType(ir.DataType.FLOAT)
        # Of the blocks, which lie as the model has the weight.
        name, factors = name.replace(SUFFIX, ""), inputs
        if matrix.residuals is not None:
            factors = _with_sums(into, name, inputs, matrix.shape[1] // BLOCK)
            name, matrix = name + RESIDUALS_AS_WEIGHTS, matrix.with_residuals_as_weights()
        rows, width = matrix.shape
        product = into.op_of(
            CONTRIB,
            "MatMulNBits",
            factors,
            into.constant(f"{name}.values", matrix.packed_values()),
            into.constant(f"{name}.scales", matrix.scales),
            into.constant(f"{name}.zero_points", matrix.packed_zero_points()),
            K=width,
            N=rows,
            bits=matrix.bits,
            block_size=BLOCK,
            accuracy_level=ACCURACY_LEVEL,
        )
        product.shape, product.type = output.shape, ir.TensorType(ir.DataType.FLOAT)
        if narrow:
            product = into.op("Cast", product, to=dtype)
        product.shape, product.type = output.shape, output.type
        into.commit()
        replace_value(output, product)
        graph.remove(node, safe=True)


def _with_sums(into: Insertion, name: str, inputs: ir.Value | None, blocks: int) -> ir.Value:
    """f [...,K] -> [...,K+n*K/32]: behind the inputs the sums of their blocks, n times."""
    if inputs is None or inputs.shape is None:
        raise ir.passes.PreconditionError(f"{name}: the rank of what it is multiplied with is not known")
    leading = [0] * (len(inputs.shape) - 1)
    in_blocks = into.op("Reshape", inputs, into.ints(*leading, blocks, BLOCK))
    sums = into.op("ReduceSum", in_blocks, into.ints(-1), keepdims=0)
    return into.op("Concat", inputs, *[sums] * copies_of_sums(blocks), axis=-1)
