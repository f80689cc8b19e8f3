"""A session of a bundle's graph that was edited in memory: nothing is written, and its weights lie where they did."""

from pathlib import Path

import onnx
import onnxruntime as ort
from sinkring.runtime.backends.onnxruntime import set_common_options


def open_edited(
    model: onnx.ModelProto, bundle: Path, *, threads: int | None = None, prepacked: bool = False, optimized: bool = True
) -> ort.InferenceSession:
    """On the CPU. threads: default all cores. prepacked: as the runtime opens weights in blocks; others it leaves in the bundle's file.

    optimized=False: each node runs as it stands in the graph.
    """
    options = ort.SessionOptions()
    set_common_options(options)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle))
    if not prepacked:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
