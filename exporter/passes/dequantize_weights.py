"""A float weight that is stored in 4 or 8 bits -> DequantizeLinear of it in front of the product, which TensorRT fuses into the product.

int4: scales of blocks along the inputs, one node for all that read the weight; so a tied table is stored once, also in an engine.

int8, fp8: TensorRT-RTX 1.7.1 fuses a scale for each output into no product of one token (T = 1): it writes the whole weight as float16 at
every step. It does fuse one scale for all. So the node has the median of the scales, and what comes out of the product is multiplied with
each output's own scale over the median (near 1, so that no float16 in between overflows or vanishes); so is each row that is looked up.
"""

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from sinkring.exporter.passes.insertion import Insertion, replace_value
from sinkring.exporter.passes.store_symmetric import StoreSymmetric
from sinkring.exporter.quantize_symmetric import SymmetricMatrix

VALUES, SCALES, RATIOS = ".values", ".scales", ".ratios"


class DequantizeWeights(StoreSymmetric):
    """See StoreSymmetric."""

    def replace(self, graph: ir.Graph, weight: ir.Value, matrix: SymmetricMatrix, name: str, transposed: bool) -> None:
        users = [user for user, _ in weight.uses()]
        dtype = _numpy(weight)
        into = Insertion(graph, min(users, key=list(graph).index))
        values = into.constant(name + VALUES, np.ascontiguousarray(matrix.values.T) if transposed else matrix.values)
        by_row = matrix.kind != "int4"
        if not by_row:
            scales = matrix.scales.T if transposed else matrix.scales
            dequantized = into.op(
                "DequantizeLinear",
                values,
                into.constant(name + SCALES, np.ascontiguousarray(scales.astype(dtype))),
                axis=0 if transposed else 1,
                block_size=matrix.block,
            )
        else:
            one, ratios = _one_and_ratios(matrix.scales[:, 0], dtype)
            dequantized = into.op("DequantizeLinear", values, into.constant(name + SCALES, one))
        dequantized.shape, dequantized.type = weight.shape, weight.type
        into.commit()
        ir.convenience.replace_all_uses_with(weight, dequantized)
        for user in users if by_row and np.any(ratios != 1) else ():
            _multiply_with_ratios(graph, user, dequantized, name + RATIOS, ratios)


def _one_and_ratios(scales: NDArray[np.float32], dtype: Any) -> tuple[NDArray, NDArray]:
    """One scale for all rows, of full precision, and for each row what its own is over that: [] and [N]."""
    one = np.asarray(max(float(np.median(scales)), float(ml_dtypes.finfo(dtype).tiny)), dtype)
    return one, (scales / one.astype(np.float32)).astype(dtype)


def _multiply_with_ratios(graph: ir.Graph, user: ir.Node, weight: ir.Value, name: str, ratios: NDArray) -> None:
    """user: a node that reads `weight` without the ratios of its rows."""
    output = user.outputs[0]
    into = Insertion(graph, user)
    if user.op_type == "Gather" and user.inputs[0] is weight and user.attributes.get_int("axis", 0) == 0:
        # [V,1]: one for all numbers of a row.
        column = into.constant(name + ".rows", ratios[:, None])
        copy = into.op("Gather", weight, user.inputs[1], axis=0)
        scaled = into.op("Mul", copy, into.op("Gather", column, user.inputs[1], axis=0))
    elif user.op_type == "MatMul" and user.inputs[1] is weight:
        scaled = into.op("Mul", into.op("MatMul", user.inputs[0], weight), into.constant(name, ratios))
    elif user.op_type == "Gemm" and user.inputs[1] is weight and len(user.inputs) == 2 and user.attributes.get_int("transB", 0) == 1:
        scaled = into.op("Mul", into.op("Gemm", user.inputs[0], weight, transB=1), into.constant(name, ratios))
    elif user.op_type == "Transpose":
        # Stored as the model has it and turned here: [N,K] -> [K,N].
        scaled = into.op("Mul", into.op("Transpose", weight, perm=[1, 0]), into.constant(name, ratios))
    else:
        raise ir.passes.PreconditionError(f"{user.name}: {user.op_type} reads {weight.name}, which only products and look-ups can")
    scaled.shape, scaled.type = output.shape, output.type
    into.commit()
    replace_value(output, scaled)
    graph.remove(user, safe=True)


def _numpy(weight: ir.Value) -> Any:
    assert weight.dtype is not None, f"{weight.name}: an initializer has a dtype"
    return weight.dtype.numpy()
