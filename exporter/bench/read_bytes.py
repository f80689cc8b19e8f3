"""Bytes that a decode step reads, from its graph."""

from collections import defaultdict
from math import prod
from pathlib import Path

import onnx
from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest

# Operators that read rows of their first input, not all of it.
_LOOKUPS = ("Gather", "GatherBlockQuantized")


def step_read_bytes(bundle: Path, manifest: Manifest, target: str) -> int:
    """Every weight once, for all rows together, every slot of every cache, and of tables in which rows are looked up those rows.

    An embedding that is the head as well counts once. Raises BundleError for a graph that is no ONNX file.
    """
    path = bundle / manifest.graph("decode", target).path
    try:
        graph = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False)).graph
    except Exception as error:  # protobuf's errors share no base
        raise BundleError(f"{path}: is not an ONNX file ({error}); export again") from None
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.value_info}
    sizes = {tensor.name: onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize for tensor in graph.initializer}
    whole: set[str] = set()
    looked_up: dict[str, int] = defaultdict(int)
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name not in sizes:
                continue
            if place == 0 and node.op_type in _LOOKUPS:
                # Of an operator that ONNX cannot follow, nothing: a few rows of an embedding.
                looked_up[name] += prod(shapes.get(node.output[0]) or [0]) * sizes[name]
            else:
                whole.add(name)
    weights = sum(prod(tensor.dims) * sizes[tensor.name] for tensor in graph.initializer if tensor.name in whole)
    return weights + sum(rows for name, rows in looked_up.items() if name not in whole) + manifest.cache_bytes
