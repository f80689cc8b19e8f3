"""A product with a weight of 8 bits and one scale for each output -> a product of integers, for ONNX Runtime: the form for long prompts.

Processors multiply small integers many times faster than floats (AMX, VNNI), but one byte is too little for an input: a few of its numbers
are much larger than the rest, and rounding all to 1/127 of the largest costs several percent of perplexity. So each input row is two
bytes, digits of base 254, and each digit is a row of the product:

    x = s * (q1 + q2 / 254) + rest,  s = max|x| / 127,  |rest| <= s / 508

    y = scale * (s * (q1 . w) + s / 254 * (q2 . w))

The error is that of 15 bits, float32's neighbours see nothing of it, and a row depends on nothing but itself. Both digits are stored above
128, since the kernels take unsigned inputs and signed weights.
"""

import numpy as np
import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value
from sinkring.exporter.passes.store_in_blocks import CONTRIB
from sinkring.exporter.passes.store_symmetric import StoreSymmetric
from sinkring.exporter.quantize_symmetric import SymmetricMatrix

LARGEST = 127.0
# How many steps of the second digit make one of the first: the rest of the first is at most half a step either way.
BASE = 254.0
# Of a row of zeros, which has no largest number.
_TINY = 1e-30


class MultiplyIntegers(StoreSymmetric):
    """Of matrices of kind int8 (see StoreSymmetric)."""

    def replace(self, graph: ir.Graph, weight: ir.Value, matrix: SymmetricMatrix, name: str, transposed: bool) -> None:
        for user, place in list(weight.uses()):
            if place != 1 or not _is_product(user, transposed):
                raise ir.passes.PreconditionError(f"{user.name}: {user.op_type} reads {weight.name}, which only a product can")
            _multiply(graph, user, matrix, name)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        result = super().call(model)
        if result.modified:
            model.opset_imports[CONTRIB] = 1
        return result


def _is_product(node: ir.Node, transposed: bool) -> bool:
    """Whether it is x . w with w [K,N] `transposed`, or, of two dimensions, the Gemm x . w^T with w [N,K] and perhaps a bias."""
    if node.op_type == "MatMul":
        return transposed
    plain = all(node.attributes.get_float(factor, 1.0) == 1 for factor in ("alpha", "beta")) and not node.attributes.get_int("transA", 0)
    return node.op_type == "Gemm" and plain and bool(node.attributes.get_int("transB", 0)) != transposed


def _multiply(graph: ir.Graph, node: ir.Node, matrix: SymmetricMatrix, name: str) -> None:
    into, output = Insertion(graph, node), node.outputs[0]
    given = node.inputs[0]
    if given is None or given.shape is None or given.dtype is None:
        raise ir.passes.PreconditionError(f"{node.name}: the shape and dtype of what {name} is multiplied with are not known")
    outputs, width = matrix.shape
    rows = into.op("Reshape", given, into.ints(-1, width))
    if given.dtype != ir.DataType.FLOAT:
        rows = into.op("Cast", rows, to=ir.DataType.FLOAT)
    digits, scales = _digits(into, rows, width)
    products = into.op_of(
        CONTRIB,
        "MatMulIntegerToFloat",
        digits,
        into.constant(f"{name}.values", np.ascontiguousarray(matrix.values.T)),
        into.constant("f32.one", np.array(1, np.float32)),
        into.constant(f"{name}.scales", matrix.scales[:, 0]),
        into.constant("u8.middle", np.array(128, np.uint8)),
    )
    # [R,1,2] . [R,2,N]: both digits of a row, each with its scale, in one pass.
    summed = into.op("MatMul", scales, into.op("Reshape", products, into.ints(-1, 2, outputs)))
    # 0 keeps a length as it is.
    leading = [size if isinstance(size, int) else 0 for size in list(given.shape)[:-1]]
    if leading.count(0) > 1:
        raise ir.passes.PreconditionError(f"{node.name}: more than one length of {given.shape} is not known")
    product = into.op("Reshape", summed, into.ints(*(size or -1 for size in leading), outputs))
    if given.dtype != ir.DataType.FLOAT:
        product = into.op("Cast", product, to=given.dtype)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        product = into.op("Add", product, bias)
    product.shape, product.type = output.shape, output.type
    into.commit()
    replace_value(output, product)
    graph.remove(node, safe=True)


def _digits(into: Insertion, rows: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """float32 [R,K] -> uint8 [2R,K], the two digits of each row under each other, and their scales float32 [R,1,2]."""
    sizes = into.op("Abs", rows)
    largest = into.op("ReduceMax", sizes, into.ints(-1), keepdims=1)
    # The mean, never above it, is there for the sake of NaN: ONNX Runtime's ReduceMax passes over one, and integers cannot be it.
    mean = into.op("ReduceMean", sizes, into.ints(-1), keepdims=1)
    largest = into.op("Max", largest, mean, into.constant("f32.tiny", np.array(_TINY, np.float32)))
    step = into.op("Mul", largest, into.constant("f32.first_step", np.array(1 / LARGEST, np.float32)))
    one, middle = into.constant("f32.one", np.array(1, np.float32)), into.constant("u8.middle", np.array(128, np.uint8))
    steps = into.op("Div", rows, step)
    high = into.op("QuantizeLinear", steps, one, middle)
    rest = into.op("Sub", steps, into.op("DequantizeLinear", high, one, middle))
    low = into.op("QuantizeLinear", rest, into.constant("f32.second_step", np.array(1 / BASE, np.float32)), middle)
    # [R,K] and [R,K] side by side are [2R,K] with the digits of a row under each other.
    digits = into.op("Reshape", into.op("Concat", high, low, axis=1), into.ints(-1, width))
    each = into.constant("f32.digits", np.array([[[1, 1 / BASE]]], np.float32))
    return digits, into.op("Mul", into.op("Unsqueeze", step, into.ints(1)), each)
