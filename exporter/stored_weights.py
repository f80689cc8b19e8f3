"""The weights of a bundle as its graphs hold them, read back for the oracle: a proof of a quantized bundle is one against these numbers.

Unpacked here anew from what the operators specify, so that a mistake in how the exporter packs them is not made twice.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest


def put_stored_weights(network: torch.nn.Module, bundle: Path, manifest: Manifest) -> dict[str, float]:
    """Give `network`, the bundle's model, the matrices that the bundle's decode graph multiplies with or looks up.

    Returns by parameter name how far each was from the model's own: the norm of the difference over the norm. Raises BundleError for a
    matrix that the model does not have.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    moved: dict[str, float] = {}
    for names, matrix in _read_matrices(bundle / manifest.graph("decode", manifest.graphs[0].target).path):
        start = 0
        for name in names:
            weight = parameters.get(name)
            if weight is None or weight.shape[1:] != matrix.shape[1:] or start + len(weight) > len(matrix):
                raise BundleError(f"{bundle}: stores {matrix.shape} for {'+'.join(names)}, which the model does not have; export again")
            stored = torch.from_numpy(matrix[start : start + len(weight)])
            before = weight.detach().clone()
            weight.data.copy_(stored)
            distance = float((stored - before).norm() / before.norm().clamp(min=1e-30))
            # A tied one is read twice, and is itself by then.
            moved[name] = max(distance, moved.get(name, 0.0))
            start += len(weight)
    return moved


def _read_matrices(path: Path) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
    """(names of the parameters whose rows they are, weight float32 [N,K]) of each quantized node."""
    # Mapped from the weights file, and read where it is needed.
    for node in ir.load(path).graph:
        if node.op_type == "DequantizeLinear":
            yield _read_dequantized(node)
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        values_at, scales_at, zeros_at = (1, 2, 3) if node.op_type == "MatMulNBits" else (0, 2, 3)
        bits, size = node.attributes["bits"].as_int(), node.attributes["block_size"].as_int()
        name, scales = _name(node, values_at), _read(node, scales_at)
        values = _unpacked(_read(node, values_at).reshape(len(scales), -1), bits).reshape(*scales.shape, size)
        zeros = _unpacked(_read(node, zeros_at), bits)[:, : scales.shape[1]]
        weight = (values.astype(np.float32) - zeros[:, :, None].astype(np.float32)) * scales[:, :, None]
        stem = name.rsplit(".", 1)[0]
        residuals = node.graph.initializers.get(f"{stem}.residuals") if node.graph is not None else None
        if residuals is not None and residuals.const_value is not None:
            weight += residuals.const_value.numpy().T[:, :, None]
        yield [part.removeprefix("model.") for part in stem.split("+")], weight.reshape(len(scales), -1)


def _read_dequantized(node: ir.Node) -> tuple[list[str], NDArray[np.float32]]:
    """The same of a weight behind DequantizeLinear: in blocks, or with one scale and a ratio for each row (see `DequantizeWeights`)."""
    name, scales = _name(node, 0), _read(node, 1)
    stem = name.rsplit(".", 1)[0]
    axis, size = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    values = _read(node, 0).astype(np.float32)
    spread = np.repeat(scales.astype(np.float32), size, axis=axis) if scales.ndim else scales.astype(np.float32)
    # As the operator rounds: to the type of its scales.
    weight = (values * spread).astype(scales.dtype).astype(np.float32)
    by_input = [user for user, index in node.outputs[0].uses() if user.op_type == "MatMul"]
    if by_input:
        weight = weight.T
    initializers = node.graph.initializers if node.graph is not None else {}
    for ratios in (initializers.get(f"{stem}.ratios"), initializers.get(f"{stem}.ratios.rows")):
        if ratios is not None and ratios.const_value is not None:
            weight = weight * ratios.const_value.numpy().astype(np.float32).reshape(-1, 1)
            break
    return [part.removeprefix("model.") for part in stem.split("+")], np.ascontiguousarray(weight)


def _name(node: ir.Node, at: int) -> str:
    value = node.inputs[at]
    assert value is not None, f"{node.name}: the operator asks for input {at}"
    return str(value.name)


def _read(node: ir.Node, at: int) -> NDArray[Any]:
    value = node.inputs[at]
    assert value is not None, f"{node.name}: the operator asks for input {at}"
    assert value.const_value is not None, f"{value.name}: is an initializer"
    return value.const_value.numpy()


def _unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The integers of each row, the low bits of a byte first: uint8 [N,n] -> [N,n*8/bits]."""
    if bits == 8:
        return packed
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(len(packed), -1)


def put_exact_products(model: onnx.ModelProto) -> None:
    """Let no quantized product of a graph round its inputs to int8: the same weights, in float32 arithmetic."""
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "MatMulNBits" else ():
            if attribute.name == "accuracy_level":
                attribute.i = 1
