"""I10 at every export: what is dead in a decode graph is found, and named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from sinkring.exporter import graph_tail
from sinkring.exporter.conformance.edited_copy import change_constant, copy_bundle, edit_graph
from sinkring.exporter.everything_used import check_everything_used
from sinkring.exporter.influence import add_noise
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Manifest

HEADS = "prefill.heads.onnx"


@pytest.fixture(params=["whole", "tails"], autouse=True)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything is found in a graph that is taken for a large one, too: only its tails are run there, and of the logits only some made."""
    if request.param == "tails":
        monkeypatch.setattr(graph_tail, "_BYTES_BETWEEN", 1)
        monkeypatch.setattr(graph_tail, "_MANY", 97)
        monkeypatch.setattr(graph_tail, "SOME", 8)
    return str(request.param)


def check(bundle: Path) -> list[str]:
    said: list[str] = []
    check_everything_used(bundle, Manifest.read(bundle), said.append)
    return said


@pytest.fixture
def edited(tiny_bundle: Path, tmp_path: Path) -> Callable[[Callable[[onnx.ModelProto], None]], Path]:
    """A copy of a bundle with S = 2 and W = 4 whose decode graph was changed."""

    def edit(change: Callable[[onnx.ModelProto], None]) -> Path:
        copy_bundle(tiny_bundle, Manifest.read(tiny_bundle), tmp_path / "copy")
        edit_graph(tmp_path / "copy", HEADS, change)
        return tmp_path / "copy"

    return edit


def silence(model: onnx.ModelProto, is_read: Callable[[onnx.NodeProto], bool], index: int) -> None:
    """Multiply the `index`th input of the one node that `is_read` by zero."""
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    (place,) = [place for place, node in enumerate(model.graph.node) if is_read(node)]
    node = model.graph.node[place]
    model.graph.node.insert(place, helper.make_node("Mul", [node.input[index], "zero"], ["silent"]))
    model.graph.node[place + 1].input[index] = "silent"


def test_a_sound_bundle_passes_and_says_what_it_does(tiny_bundle: Path) -> None:
    said = check(tiny_bundle)
    assert [line.partition(": ")[0].split()[-1] for line in said] == ["decode.fused.onnx", HEADS]
    # 2 layers of q, k, v, o, gate, up, down and 2 norms; embedding, head, norm, and the tables of angles; 4 states; 2 sinks, 1 window.
    assert int(said[0].split()[-1]) >= 2 * 9 + 3 + 4 + 2 + 1


@pytest.mark.parametrize("batch_bundle", ["tiny_bundle_of_three"])
def test_a_bundle_of_several_rows_passes(batch_bundle: str, request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(batch_bundle))


def test_one_part_of_a_merged_weight(edited: Callable[..., Path]) -> None:
    def write_nothing(model: onnx.ModelProto) -> None:
        silence(model, lambda node: node.op_type == "TensorScatter" and node.input[0] == "cache.0.k", 1)

    with pytest.raises(UnsupportedError, match=r"^prefill\.heads\.onnx: model\.layers\.0\.self_attn\.k_proj\.weight has no effect"):
        check(edited(write_nothing))


def test_a_weight_that_is_read_from_a_copy(edited: Callable[..., Path]) -> None:
    def copy_norm(model: onnx.ModelProto) -> None:
        (norm,) = [tensor for tensor in model.graph.initializer if tensor.name == "model.model.norm.weight"]
        copy = model.graph.initializer.add()
        copy.CopyFrom(norm)
        copy.name = "copy"
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                if name == norm.name:
                    node.input[index] = "copy"

    with pytest.raises(UnsupportedError, match=r"prefill\.heads\.onnx: model\.norm\.weight has no effect"):
        check(edited(copy_norm))


def test_a_state_whose_old_rows_are_lost(edited: Callable[..., Path]) -> None:
    def forget(model: onnx.ModelProto) -> None:
        silence(model, lambda node: node.op_type == "TensorScatter" and node.input[0] == "cache.1.v", 0)

    with pytest.raises(UnsupportedError, match=r"prefill\.heads\.onnx: cache\.1\.v has no effect"):
        check(edited(forget))


def test_a_sink_that_is_never_seen(edited: Callable[..., Path]) -> None:
    def hide_last(sink_from: np.ndarray) -> np.ndarray:
        sink_from[..., 1] = np.iinfo(np.int64).max
        return sink_from

    with pytest.raises(UnsupportedError, match=r"sink 1 of layers 0, 1 has no effect"):
        check(edited(lambda model: change_constant(model, ".sink_from", hide_last)))


@pytest.mark.parametrize(
    ("off", "match"),
    [
        (-1, "the oldest of the 4 tokens in the window of layers 0, 1 has no effect"),
        (1, "is older than the window of 4 tokens of layers 0, 1"),
    ],
)
def test_a_window_that_is_not_the_manifest_s(edited: Callable[..., Path], off: int, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        check(edited(lambda model: change_constant(model, ".window", lambda window: window + off)))


def test_noise_is_as_large_as_what_it_is_added_to() -> None:
    for shape in [(7,), (3, 5), (2000, 1500)]:
        array = np.full(shape, 3.0, np.float32)
        add_noise(array, 2.0)
        assert 0.5 < np.sqrt(np.mean((array - 3.0) ** 2)) / 6.0 < 1.5
        assert np.count_nonzero(array == 3.0) <= array.size // 500
    zeros = np.zeros(9, np.float32)
    add_noise(zeros, 1.0)
    assert np.all(zeros != 0)
