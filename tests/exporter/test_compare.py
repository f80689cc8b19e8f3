"""compare_runners: equal graphs differ nowhere, and a weight that was changed is found in its layer, whatever runs it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from sinkring.exporter import compare_runners as runners_module
from sinkring.exporter.compare import Comparison, compare_runners
from sinkring.exporter.conformance.edited_copy import edit_graph
from sinkring.exporter.export import export_decoder
from sinkring.runtime import open_bundle
from sinkring.runtime.errors import DependencyError, InputError

from tests.exporter.invoke_cli import invoke
from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines

FORMS = ("onnxruntime", "onnxruntime:fused")
SHORT: dict[str, Any] = {"steps": 5, "tokens": 3, "threads": 1}


def changed_weight(bundle: Path, out: Path, graph: str, part: str) -> Path:
    """A copy of the bundle in which one graph has another weight, and the name of that weight contains `part`."""
    shutil.copytree(bundle, out)

    def change(model: onnx.ModelProto) -> None:
        (tensor,) = [tensor for tensor in model.graph.initializer if part in tensor.name]
        array = numpy_helper.to_array(tensor, base_dir=str(out))
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array[..., ::-1]), tensor.name))

    edit_graph(out, graph, change)
    return out


def only_pair(found: Comparison) -> Any:
    (pair,) = found.pairs
    return pair


def test_settings_and_forms_of_one_bundle_differ_nowhere(tiny_bundle_of_three: Path) -> None:
    found = compare_runners(tiny_bundle_of_three, (*FORMS, "onnxruntime:no-optimizer:fused"), steps=40, tokens=20, threads=1)
    assert found.passed
    assert [pair.runner for pair in found.pairs] == ["onnxruntime:fused", "onnxruntime:no-optimizer:fused"]
    # Another order of adding, so not equal to the bit: that two graphs were run shows.
    assert 0 < found.pairs[0].worst.share < found.tolerance
    assert all(pair.first is None and pair.parted is None and all(step.agrees for step in pair.steps) for pair in found.pairs)


def test_the_steps_are_those_of_the_runtime(tiny_bundle: Path) -> None:
    """The threaded states make the stream that the runtime makes: the free run is its greedy one, past the ring's wraps."""
    found = compare_runners(tiny_bundle, FORMS, steps=1, tokens=40, threads=1)
    with open_bundle(tiny_bundle, threads=1) as decoder, decoder.stream() as stream:
        stream.feed(np.random.default_rng(0).integers(0, 97, 8))
        assert list(found.tokens) == list(stream.generate(40, stop_ids=()))


@pytest.mark.parametrize(
    ("weight", "layer", "place"),
    [
        ("embed_tokens.weight", None, "before the layers"),
        ("layers.0.self_attn.q_proj", 0, "layer 0"),
        ("layers.0.self_attn.o_proj", 0, "layer 0"),
        ("layers.0.mlp.down_proj", 0, "layer 0"),
        ("layers.1.input_layernorm", 1, "layer 1"),
        ("layers.1.self_attn.q_proj", 1, "layer 1"),
        ("layers.1.mlp.gate_proj", 1, "layer 1"),
        ("lm_head.weight", None, "after the layers"),
    ],
)
def test_a_changed_weight_is_found_in_its_layer(tiny_bundle: Path, tmp_path: Path, weight: str, layer: int | None, place: str) -> None:
    broken = changed_weight(tiny_bundle, tmp_path / "broken", "decode.fused.onnx", weight)
    between_forms = compare_runners(broken, FORMS, **SHORT)
    between_bundles = compare_runners(tiny_bundle, ["onnxruntime:fused"], against=broken, **SHORT)
    for found in (between_forms, between_bundles):
        first = only_pair(found).first
        assert not found.passed
        assert (first.layer, first.place) == (layer, place)
        assert first.share > found.tolerance
    # Of one graph, the very node that reads the weight.
    nodes = {node.name: node for node in onnx.load(tiny_bundle / "decode.fused.onnx", load_external_data=False).graph.node}
    assert any(weight in name for name in nodes[only_pair(between_bundles).first.node].input)


def test_a_cache_that_is_written_elsewhere_is_found(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "broken")

    def write_first_slot(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), "elsewhere"))
        (scatter,) = [node for node in model.graph.node if node.output[0] == "cache.1.v.updated"]
        scatter.input[2] = "elsewhere"

    edit_graph(tmp_path / "broken", "decode.fused.onnx", write_first_slot)
    first = only_pair(compare_runners(tmp_path / "broken", FORMS, **SHORT)).first
    assert (first.step, first.layer, first.value) == (1, 1, "cache.1.v.updated")


def test_graphs_that_take_rows_are_fed_embedded_tokens(tiny_model: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    export_decoder(tiny_model, tmp_path / "rows", sinks=2, window=4, chunk=4, inputs="embeddings")
    by_rows, by_ids = (compare_runners(bundle, FORMS, steps=10, tokens=20, threads=1) for bundle in (tmp_path / "rows", tiny_bundle))
    assert by_rows.passed
    assert by_rows.tokens == by_ids.tokens


def test_bfloat16_is_compared_by_its_numbers(tiny_model: Path, tmp_path: Path) -> None:
    """Caches, arithmetic and what is marked are bfloat16, its bits on the host; on a CPU the widened graphs run."""
    bundle = tmp_path / "bundle"
    export_decoder(tiny_model, bundle, sinks=2, window=4, chunk=4, dtype="bf16")
    broken = changed_weight(bundle, tmp_path / "broken", "decode.fused.widened.onnx", "layers.1.mlp.down_proj")
    assert compare_runners(bundle, FORMS, **SHORT).passed
    first = only_pair(compare_runners(broken, FORMS, **SHORT)).first
    assert (first.step, first.layer) == (0, 1)
    assert np.isfinite(first.share)


def test_the_command_prints_a_table_or_json(tiny_bundle: Path, tmp_path: Path) -> None:
    broken = changed_weight(tiny_bundle, tmp_path / "broken", "decode.fused.onnx", "layers.1.mlp.down_proj")
    options = ("--runners", ",".join(FORMS), "--steps", 20, "--tokens", 12, "--threads", 1)
    good, bad = invoke("compare", tiny_bundle, *options), invoke("compare", broken, *options)
    assert (good.status, bad.status) == (0, 1)
    assert "free-running, 12 tokens from a prompt of 8: the same" in good.out
    assert good.out.strip().endswith("passed")
    assert "layer 1" in bad.out
    assert "node_linear_13" in bad.out
    assert bad.out.strip().endswith("failed: logits differ by more than the tolerance")
    said = json.loads(invoke("compare", broken, *options, "--json").out)
    assert said["passed"] is False
    assert said["pairs"][0]["first"]["layer"] == 1
    assert len(said["pairs"][0]["steps"]) == 20


@pytest.mark.parametrize(
    ("runners", "message"),
    [
        (["onnxruntime"], "name two or more to compare"),
        (["onnxruntime", "onnxruntime"], "one is named twice"),
        (["onnxruntime", "openvino"], "'openvino' is not known; known: onnxruntime, tensorrt, tensorrt-10.3, tensorrt-rtx"),
        (["onnxruntime", "onnxruntime:fast"], "'fast' is no option of onnxruntime; it takes: no-optimizer, fused, heads"),
        (["onnxruntime", "tensorrt-rtx:fused"], "'fused' is no option of tensorrt-rtx; it takes none"),
        (["onnxruntime", "onnxruntime:fused:heads"], "names the forms fused and heads"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_bundle: Path, runners: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare_runners(tiny_bundle, runners)


def test_bundles_of_other_sizes_are_refused(tiny_bundle: Path, tiny_bundle_of_three: Path) -> None:
    with pytest.raises(InputError, match="differ in their rows: 1, 3; export both alike"):
        compare_runners(tiny_bundle, FORMS, against=tiny_bundle_of_three)


def test_without_a_gpu_an_engine_is_an_error_that_says_so(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaDouble()
    cuda.no_driver = True
    install_doubles(monkeypatch, cuda)
    with pytest.raises(DependencyError, match="backend 'tensorrt-rtx' runs on an NVIDIA GPU, and CUDA reports"):
        compare_runners(tiny_bundle, **SHORT)


@pytest.fixture
def engine_bundle(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Path]:
    """A bundle with engines that the doubles run; given the part of a name, the decode engine has another weight there."""
    cuda = CudaDouble()
    install_doubles(monkeypatch, cuda)

    def make(weight: str | None) -> Path:
        out = with_engines(tiny_bundle, tmp_path / "engines")
        if weight:
            broken = changed_weight(tiny_bundle, tmp_path / "broken", "decode.fused.onnx", weight)
            (note,) = out.glob("engines/*/decode.engine")
            note.write_text(json.dumps({**json.loads(note.read_text()), "onnx": str(broken / "decode.fused.onnx")}))

            def compile_marked(*_: Any, graph: bytes, **__: Any) -> Any:
                """What the builder would make: an engine of the marked graph with the same fault."""
                model, fault = onnx.load_from_string(graph), onnx.load(broken / "decode.fused.onnx", load_external_data=False)
                del model.graph.initializer[:]
                model.graph.initializer.extend(fault.graph.initializer)
                (broken / "marked.onnx").write_bytes(model.SerializeToString())
                content = {"role": "decode", "onnx": str(broken / "marked.onnx"), "next_token": False}
                return SimpleNamespace(engine=json.dumps(content).encode())

            monkeypatch.setattr(runners_module, "compile_engine", compile_marked)
        return out

    return make


def test_an_engine_runs_and_threads_its_caches(engine_bundle: Callable[[str | None], Path]) -> None:
    found = compare_runners(engine_bundle(None), steps=20, tokens=12, threads=1)
    assert found.passed
    assert only_pair(found).parted is None
    assert only_pair(found).worst.share > 0


def test_an_engine_that_differs_is_compiled_again_with_marked_layers(engine_bundle: Callable[[str | None], Path]) -> None:
    first = only_pair(compare_runners(engine_bundle("layers.1.self_attn.o_proj"), **SHORT)).first
    assert (first.layer, first.place) == (1, "layer 1")
