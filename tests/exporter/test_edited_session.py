"""A session of a graph in memory: what it is told of threads, and that the numbers are the same."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from sinkring.exporter.edited_session import open_edited, run_session

GRAPH = """
<ir_version: 10, opset_import: ["" : 24]>
step (float[2,3] x) => (float[2,3] y) { y = MatMul (x, weight) }
"""
KEY = "session.intra_op.allow_spinning"


def test_threads_that_sleep_while_they_wait(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(GRAPH)
    weight = np.arange(9, dtype=np.float32).reshape(3, 3)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    usual, sleeping = open_edited(model, tmp_path), open_edited(model, tmp_path, spinning=False)
    assert sleeping.get_session_options().get_session_config_entry(KEY) == "0"
    with pytest.raises(RuntimeError, match="does not have"):
        usual.get_session_options().get_session_config_entry(KEY)
    given = np.ones((2, 3), np.float32)
    for session in (usual, sleeping):
        assert np.array_equal(run_session(session, ["y"], {"x": given})[0], given @ weight)
