"""The weights of a bundle as its graphs hold them, read back for the oracle: a proof of a quantized bundle is one against these numbers.

Unpacked here anew from what the operators specify, so that a mistake in how the exporter packs them is not made twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from sinkring.exporter.passes.quantize_projections import RESIDUALS_AS_WEIGHTS
from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest


@dataclass(frozen=True)
class Moved:
    """How far a stored matrix is from the model's own. distance: norm of the difference over the norm. beyond: share of its weights that
    are further off than rounding to the nearest of their grid explains, 0 for blocks with zero points, whose grids are not known here.
    residuals: whether its blocks have some, which are rounded.
    """

    distance: float
    beyond: float = 0.0
    residuals: bool = False


@dataclass(frozen=True)
class _Stored:
    """names: of the parameters whose rows they are. weight: float32 [N,K]. nearest: float32 [N,K], most that rounding moves each.

    residuals: whether its blocks have some.
    """

    names: list[str]
    weight: NDArray[np.float32]
    nearest: NDArray[np.float32] | None = None
    residuals: bool = False


def put_stored_weights(network: torch.nn.Module, bundle: Path, manifest: Manifest) -> dict[str, Moved]:
    """Give `network`, the bundle's model, the matrices that the bundle's decode graph multiplies with or looks up.

    Returns by parameter name how far each was from the model's own. Raises BundleError for a matrix that the model does not have.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    moved: dict[str, Moved] = {}
    # `network` holds its weights rounded to the bundle's type, and what is stored was chosen from them as they were before.
    rounding = float(np.finfo(np.float16).eps) if manifest.dtype == "float16" else 0.0
    for stored in _read_matrices(bundle / manifest.graph("decode", manifest.graphs[0].target).path):
        start, matrix = 0, stored.weight
        for name in stored.names:
            weight = parameters.get(name)
            if weight is None or weight.shape[1:] != matrix.shape[1:] or start + len(weight) > len(matrix):
                raise BundleError(
                    f"{bundle}: stores {matrix.shape} for {'+'.join(stored.names)}, which the model does not have; export again"
                )
            rows = slice(start, start + len(weight))
            off, beyond = (torch.from_numpy(matrix[rows]) - weight).numpy(), 0.0
            if stored.nearest is not None:
                beyond = float(np.mean(np.abs(off) > stored.nearest[rows] + rounding * np.abs(matrix[rows])))
            found = Moved(float(np.linalg.norm(off) / max(float(weight.norm()), 1e-30)), beyond, stored.residuals)
            weight.data.copy_(torch.from_numpy(matrix[rows]))
            # A tied one may be read twice, and is itself by then.
            moved.setdefault(name, found)
            start += len(weight)
    return moved


def _read_matrices(path: Path) -> Iterator[_Stored]:
    """What each quantized node multiplies with or looks up."""
    # Mapped from the weights file, and read where it is needed.
    for node in ir.load(path).graph:
        # In front of a product of integers it is inputs that are dequantized.
        if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].is_initializer():
            yield _read_dequantized(node)
        if node.op_type == "MatMulIntegerToFloat":
            yield _read_rows(node)
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        values_at, scales_at, zeros_at = (1, 2, 3) if node.op_type == "MatMulNBits" else (0, 2, 3)
        bits, size = node.attributes["bits"].as_int(), node.attributes["block_size"].as_int()
        name, scales = _name(node, values_at), _read(node, scales_at)
        values = _unpacked(_read(node, values_at).reshape(len(scales), -1), bits).reshape(*scales.shape, size)
        zeros = _unpacked(_read(node, zeros_at), bits)[:, : scales.shape[1]]
        weight = (values.astype(np.float32) - zeros[:, :, None].astype(np.float32)) * scales[:, :, None]
        weight, stem = weight.reshape(len(scales), -1), name.rsplit(".", 1)[0]
        residuals = stem.endswith(RESIDUALS_AS_WEIGHTS)
        if residuals:
            stem, weight = stem.removesuffix(RESIDUALS_AS_WEIGHTS), _with_residuals(node, weight, size)
        yield _Stored([part.removeprefix("model.") for part in stem.split("+")], weight, residuals=residuals)


def _with_residuals(node: ir.Node, weight: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """[N,K+n*K/size and padding] -> [N,K]: to the weights of a block is added what each of the n copies of its sum is multiplied with."""
    joined = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert joined is not None, f"{node.name}: sums are joined to its inputs"
    copies, inputs = len(joined.inputs) - 1, node.attributes["K"].as_int()
    blocks = inputs // (size + copies)
    residuals = weight[:, blocks * size : inputs].reshape(len(weight), copies, blocks).sum(axis=1)
    return (weight[:, : blocks * size].reshape(len(weight), blocks, size) + residuals[:, :, None]).reshape(len(weight), -1)


def _read_dequantized(node: ir.Node) -> _Stored:
    """A weight behind DequantizeLinear: in blocks, or with one scale for all and a ratio for each row (see `DequantizeWeights`)."""
    name, scales = _name(node, 0), _read(node, 1)
    stem = name.rsplit(".", 1)[0]
    axis, size = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    integers = _read(node, 0)
    values = integers.astype(np.float32)
    steps = np.repeat(scales.astype(np.float32), size, axis=axis) if scales.ndim else np.full(values.shape, scales, np.float32)
    # As the operator rounds: to the type of its scales.
    weight = (values * steps).astype(scales.dtype).astype(np.float32)
    if any(user.op_type == "MatMul" for user, _ in node.outputs[0].uses()):
        values, steps, weight = values.T, steps.T, weight.T
    initializers = node.graph.initializers if node.graph is not None else {}
    for ratios in (initializers.get(f"{stem}.ratios"), initializers.get(f"{stem}.ratios.rows")):
        if ratios is not None and ratios.const_value is not None:
            column = ratios.const_value.numpy().astype(np.float32).reshape(-1, 1)
            weight, steps = weight * column, steps * column
            break
    # Scales, ratios and products are rounded as well, which counts most for the largest values.
    rounding = np.abs(weight) * (4 * float(ml_dtypes.finfo(scales.dtype).eps)) + 1e-30
    if integers.dtype == ml_dtypes.float8_e4m3fn:
        # Half of the last of three bits, or half of the smallest number.
        nearest = np.maximum(np.abs(weight) / 14, steps * 2.0**-10) + rounding
    else:
        ends = ml_dtypes.iinfo(integers.dtype)
        clipped = (values <= ends.min) | (values >= ends.max)
        nearest = np.where(clipped & (ends.bits == 4), np.inf, np.abs(steps) / 2 + rounding)
    return _Stored([part.removeprefix("model.") for part in stem.split("+")], np.ascontiguousarray(weight), nearest.astype(np.float32))


def _read_rows(node: ir.Node) -> _Stored:
    """The weight of a product of integers, [K,N] with a scale for each of its N columns."""
    steps = _read(node, 3)[:, None].astype(np.float32)
    weight = _read(node, 1).T.astype(np.float32) * steps
    nearest = np.broadcast_to(steps * (0.5 + 1e-4), weight.shape).astype(np.float32)
    names = _name(node, 1).rsplit(".", 1)[0].split("+")
    return _Stored([part.removeprefix("model.") for part in names], np.ascontiguousarray(weight), nearest)


def _name(node: ir.Node, at: int) -> str:
    value = node.inputs[at]
    assert value is not None, f"{node.name}: the operator asks for input {at}"
    return str(value.name)


def _read(node: ir.Node, at: int) -> NDArray[Any]:
    value = node.inputs[at]
    assert value is not None, f"{node.name}: the operator asks for input {at}"
    assert value.const_value is not None, f"{value.name}: is an initializer"
    if not isinstance(value.const_value, ir.ExternalTensor):
        return value.const_value.numpy()
    # Mapped here: onnx-ir refuses files with a second hard link, as a copy of a bundle may have.
    tensor = value.const_value
    raw = np.memmap(tensor.path, np.uint8, "r", tensor.offset or 0, (tensor.nbytes,))
    if tensor.dtype != ir.DataType.INT4:
        return raw.view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
    numbers = _unpacked(raw[None], 4)[0].astype(np.int8)[: int(np.prod(tensor.shape.numpy()))]
    return np.where(numbers > 7, numbers - 16, numbers).astype(ml_dtypes.int4).reshape(tensor.shape.numpy())


def _unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The integers of each row, the low bits of a byte first: uint8 [N,n] -> [N,n*8/bits]."""
    if bits == 8:
        return packed
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(len(packed), -1)


def put_exact_products(model: onnx.ModelProto) -> None:
    """Let no quantized product of a graph round its inputs to int8: the same weights, in float32 arithmetic."""
    for product in [node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat"]:
        _put_float_product(model, product)
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "MatMulNBits" else ():
            if attribute.name == "accuracy_level":
                attribute.i = 1


def _put_float_product(model: onnx.ModelProto, product: onnx.NodeProto) -> None:
    """The rows that a product of integers was given in two digits, times the dequantized weight, in the place of the digits' sum."""
    makers = {name: node for node in model.graph.node for name in node.output}
    source = makers[product.input[0]]
    while source.op_type != "QuantizeLinear":
        source = makers[source.input[0]]
    summed, value = None, product.output[0]
    while summed is None or summed.op_type != "MatMul":
        (summed,) = (node for node in model.graph.node if value in node.input)
        value = summed.output[0]
    # What the digits were made of: the rows over their steps.
    weight, rows = f"{product.input[1]}.dequantized", makers[source.input[0]].input[0]
    at = list(model.graph.node).index(summed)
    model.graph.node.insert(at, onnx.helper.make_node("DequantizeLinear", [product.input[1], product.input[3]], [weight], axis=1))
    # [R,N] where the sum of the digits is [R,1,N]: all that reads it is a Reshape.
    summed.input[0], summed.input[1] = rows, weight
