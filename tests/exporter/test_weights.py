"""The weights file: each tensor once, on a page of its own, found again by every graph; small ones stay in the graph."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from sinkring.exporter.weights import ALIGNMENT_BYTES, INLINE_LIMIT_BYTES, WeightsFile

RANDOM = np.random.default_rng(0)
LARGE = RANDOM.standard_normal((50, 40), dtype=np.float32)
OTHER = RANDOM.standard_normal((50, 40), dtype=np.float32)
SMALL = np.arange(8, dtype=np.float32)


def graph_of(**tensors: np.ndarray) -> ir.Model:
    """A graph that hands out each of the tensors."""
    nodes, outputs, initializers = [], [], []
    for name, array in tensors.items():
        weight = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        weight.shape, weight.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
        node = ir.node("Identity", [weight])
        node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = f"{name}.out", weight.shape, weight.type
        initializers.append(weight)
        nodes.append(node)
        outputs.append(node.outputs[0])
    graph = ir.Graph([], outputs, nodes=nodes, initializers=initializers, opset_imports={"": 24}, name="weights")
    return ir.Model(graph, ir_version=10)


def locations(path: Path) -> dict[str, tuple[int, int] | None]:
    """(offset, length) of each initializer in the weights file, None for one inside the graph."""
    found: dict[str, tuple[int, int] | None] = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries.get("location", "weights.bin") == "weights.bin", "must be found wherever the bundle is moved"
        found[tensor.name] = (int(entries["offset"]), int(entries["length"])) if entries else None
    return found


def save(folder: Path, **graphs: ir.Model) -> dict[str, dict[str, tuple[int, int] | None]]:
    with WeightsFile(folder / "weights.bin") as weights:
        for name, model in graphs.items():
            weights.save_graph(model, folder / f"{name}.onnx")
    return {name: locations(folder / f"{name}.onnx") for name in graphs}


def test_equal_tensors_are_stored_once_under_any_name_in_any_graph(tmp_path: Path) -> None:
    found = save(tmp_path, a=graph_of(x=LARGE, y=OTHER, again=LARGE.copy()), b=graph_of(z=LARGE.copy(), y=OTHER))
    assert found["a"]["x"] == found["a"]["again"] == found["b"]["z"] == (0, 8000)
    assert found["a"]["y"] == found["b"]["y"] == (8192, 8000)
    assert (tmp_path / "weights.bin").stat().st_size == 8192 + 8000


def test_tensors_that_differ_in_one_bit_or_in_type_are_not_the_same(tmp_path: Path) -> None:
    nearly = LARGE.copy()
    nearly[-1, -1] = np.nextafter(nearly[-1, -1], np.float32(9))
    found = save(tmp_path, a=graph_of(x=LARGE, nearly=nearly, bits=LARGE.view(np.int32)))["a"]
    assert len(set(found.values())) == 3


def test_every_offset_is_on_a_page(tmp_path: Path) -> None:
    sizes = (1025, 4097, 1024 * 3, 2049)
    found = save(tmp_path, a=graph_of(**{f"w{size}": RANDOM.standard_normal(size, dtype=np.float32) for size in sizes}))["a"]
    offsets = [place[0] for place in found.values() if place is not None]
    assert len(offsets) == 4
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)


@pytest.mark.parametrize(("size", "inside"), [(1, True), (INLINE_LIMIT_BYTES // 4, True), (INLINE_LIMIT_BYTES // 4 + 1, False)])
def test_small_tensors_stay_in_the_graph(tmp_path: Path, size: int, inside: bool) -> None:
    assert (save(tmp_path, a=graph_of(x=np.ones(size, np.float32)))["a"]["x"] is None) == inside


def test_the_graph_in_memory_is_left_as_it_was(tmp_path: Path) -> None:
    model = graph_of(x=LARGE, small=SMALL)
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    save(tmp_path, a=model)
    assert all(value.const_value is before[name] for name, value in model.graph.initializers.items())


def test_it_is_left_as_it_was_also_when_saving_fails(tmp_path: Path) -> None:
    model = graph_of(x=LARGE)
    before = model.graph.initializers["x"].const_value
    (tmp_path / "a.onnx").mkdir()
    with pytest.raises(OSError, match=r"a\.onnx"):
        save(tmp_path, a=model)
    assert model.graph.initializers["x"].const_value is before


def test_every_reader_gets_the_values_back(tmp_path: Path) -> None:
    transposed = OTHER.T  # not contiguous: stored as it is indexed, not as it lies in memory
    tensors = {"x": LARGE, "t": transposed, "small": SMALL, "ints": np.arange(2000), "again": LARGE.copy()}
    save(tmp_path, a=graph_of(**tensors))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    by_onnx = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(moved / "a.onnx").graph.initializer}
    session = ort.InferenceSession(str(moved / "a.onnx"))
    by_ort = dict(zip(tensors, session.run([f"{name}.out" for name in tensors], {}), strict=True))
    for name, array in tensors.items():
        np.testing.assert_array_equal(by_onnx[name], array)
        np.testing.assert_array_equal(by_ort[name], array)
