"""A session of a bundle's graph that was edited in memory: nothing is written, and its weights lie where they did."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from sinkring.runtime.backends.onnxruntime import set_common_options
from sinkring.runtime.bfloat16 import BFLOAT16, element_type


def open_edited(
    model: onnx.ModelProto,
    bundle: Path,
    *,
    threads: int | None = None,
    prepacked: bool = False,
    optimized: bool = True,
    spinning: bool = True,
) -> ort.InferenceSession:
    """On the CPU. threads: default all cores. prepacked: as the runtime opens weights in blocks; others it leaves in the bundle's file.

    optimized=False: each node runs as it stands in the graph. spinning=False: threads sleep while they wait for each other, which costs a
    little where the cores are free, and halves the time where others want them.
    """
    options = ort.SessionOptions()
    set_common_options(options)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle))
    if not prepacked:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_session(session: ort.InferenceSession, names: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs `names` of one run. As `session.run`, but that bfloat16 goes in and comes out as its bits, uint16."""
    narrow = {
        node.name
        for node in (*session.get_inputs(), *session.get_overridable_initializers(), *session.get_outputs())
        if node.type == f"tensor({BFLOAT16})"
    }
    if not narrow:
        plain: list[NDArray[Any]] = session.run(list(names), dict(feeds))
        return plain
    binding = session.io_binding()
    held = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
    for name, array in held.items():
        kind = element_type(BFLOAT16) if name in narrow else array.dtype
        binding.bind_input(name, "cpu", 0, kind, array.shape, array.ctypes.data)
    for name in names:
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    return [_bits(value) if name in narrow else value.numpy() for name, value in zip(names, binding.get_outputs(), strict=True)]


def _bits(value: Any) -> NDArray[np.uint16]:
    """A copy of what an OrtValue of bfloat16 holds, which it gives to no numpy array itself."""
    shape = tuple(value.shape())
    whole = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    return np.array(whole, np.uint16).reshape(shape)
