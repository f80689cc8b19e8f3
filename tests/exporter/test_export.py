"""export_decoder: what it refuses, what it leaves behind when it fails, and that it makes the same bytes twice."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from sinkring.exporter import export as exporting
from sinkring.exporter.bundle_writer import sha256_of
from sinkring.exporter.export import export_decoder
from sinkring.exporter.weights import ALIGNMENT_BYTES, WeightsFile
from sinkring.runtime import open_bundle
from sinkring.runtime.bundle import check_files
from sinkring.runtime.errors import BundleError, GeometryError, InputError, SinkringError, UnsupportedError
from sinkring.runtime.manifest import CONTRACT_KEY, Manifest

from tests.conftest import ROOT
from tests.models.tiny import tiny_llama

TINY: dict[str, Any] = {"sinks": 2, "window": 4, "chunk": 4}
STAGES = ["loading", "tracing decode", "tracing prefill", "writing the manifest"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


@pytest.fixture
def old(out: Path) -> dict[str, bytes]:
    """A bundle that stands at `out` already."""
    out.mkdir()
    (out / "manifest.json").write_text('{"format": "sinkring-bundle"}')
    (out / "weights.bin").write_bytes(b"old")
    return content(out)


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is nine tenths of an export, and what is looked at here comes before and after it."""
    trace = exporting.trace_step

    def remember(*arguments: Any, role: str, **options: Any) -> Any:
        if role not in _TRACED:
            _TRACED[role] = trace(*arguments, role=role, **options)  # type: ignore[arg-type]
        return _TRACED[role].clone()

    monkeypatch.setattr(exporting, "trace_step", remember)


_TRACED: dict[str, Any] = {}


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path != out)


def refuse_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> None:
        pytest.fail("the model was loaded before the option was looked at")

    monkeypatch.setattr(exporting, "load_model", load)


def test_two_exports_are_the_same_bytes(tiny_model: Path, tiny_bundle: Path, out: Path) -> None:
    said: list[str] = []
    export_decoder(tiny_model, out, **TINY, progress=said.append)
    assert content(out) == content(tiny_bundle)
    assert [line.startswith(stage) for line, stage in zip(said, STAGES, strict=True)] == [True] * 4


def test_the_manifest_names_all_there_is(tiny_bundle: Path) -> None:
    manifest = Manifest.read(tiny_bundle)
    check_files(tiny_bundle, manifest)
    assert {file.path for file in manifest.files} | {"manifest.json"} == content(tiny_bundle).keys()
    assert {graph.path for graph in manifest.graphs} < {file.path for file in manifest.files}
    assert {(graph.role, graph.target) for graph in manifest.graphs} == {
        (role, target) for role in ("decode", "prefill") for target in ("onnxruntime", "tensorrt-rtx")
    }
    assert manifest.cache_bytes == manifest.cache_bytes_formula == 16 * 2 * 2 * 2 * 8 * 4


def test_the_graphs_tell_nothing_of_the_machine(tiny_bundle: Path, tiny_model: Path) -> None:
    for name, data in content(tiny_bundle).items():
        if not name.endswith(".onnx"):
            continue
        for trace in (str(ROOT), "site-packages", "torch/", ".py", str(tiny_model), str(Path.home()) + "/", "Traceback"):
            assert trace.encode() not in data, f"{name} holds {trace!r}"
        model = onnx.load_model_from_string(data)
        assert (model.producer_name, model.doc_string, [entry.key for entry in model.metadata_props]) == ("sinkring", "", [CONTRACT_KEY])
        assert not any(node.doc_string or node.metadata_props for node in model.graph.node)


def test_weights_are_stored_once(tiny_model: Path, tiny_bundle: Path) -> None:
    """The parameters (embedding and head are tied in the second model) and the angle tables, each padded to a page; nothing twice."""
    assert (tiny_bundle / "weights.bin").stat().st_size <= _expected_bytes(tiny_llama())


def test_tied_weights_are_stored_once(tmp_path: Path, out: Path) -> None:
    model = tiny_llama(tied=True, vocab=1000)
    model.save_pretrained(tmp_path / "tied")
    manifest = export_decoder(tmp_path / "tied", out, **TINY, targets=["onnxruntime"])
    size = (out / "weights.bin").stat().st_size
    assert size == manifest.model.weight_bytes
    assert size <= _expected_bytes(model)
    with open_bundle(out, threads=1) as decoder:
        assert np.ptp(decoder.stream().feed(np.arange(30))) > 1


def _expected_bytes(model: Any) -> int:
    parameters = [parameter.numel() * 4 for parameter in model.parameters()]
    tables = [(1 << 14) * 8 * 4] * 3
    return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in (*parameters, *tables))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("exception", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.usefixtures("traced_once")
def test_an_interrupt_at_any_stage_leaves_nothing(tiny_model: Path, out: Path, stage: str, exception: type[BaseException]) -> None:
    def interrupt(line: str) -> None:
        if line.startswith(stage):
            raise exception

    with pytest.raises(exception):
        export_decoder(tiny_model, out, **TINY, progress=interrupt)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("traced_once")
def test_an_interrupt_at_any_stage_leaves_the_old_bundle(tiny_model: Path, out: Path, old: dict[str, bytes], stage: str) -> None:
    def interrupt(line: str) -> None:
        if line.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_decoder(tiny_model, out, **TINY, overwrite=True, progress=interrupt)
    assert content(out) == old
    assert beside(out) == []


@pytest.mark.usefixtures("traced_once", "old")
def test_overwrite_replaces_all_of_the_old_bundle(tiny_model: Path, tiny_bundle: Path, out: Path) -> None:
    (out / "old.engine").touch()
    export_decoder(tiny_model, out, **TINY, overwrite=True)
    assert content(out).keys() == content(tiny_bundle).keys()
    check_files(out, Manifest.read(out))
    assert beside(out) == []


KILLED = """
import sys, time
from sinkring.exporter.export import export_decoder

def stop(line):
    if line.startswith("tracing prefill"):  # half of the graphs and weights are written
        print("there", flush=True)
        time.sleep(120)

export_decoder(sys.argv[1], sys.argv[2], sinks=2, window=4, chunk=4, overwrite=True, progress=stop)
"""


@pytest.mark.usefixtures("traced_once")
def test_a_killed_export_leaves_the_old_bundle_and_the_next_one_clears_up(tiny_model: Path, out: Path, old: dict[str, bytes]) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tiny_model), str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert content(out) == old
    (left,) = beside(out)
    assert "decode.grouped.onnx" in content(out.parent / left)
    export_decoder(tiny_model, out, **TINY, overwrite=True)
    open_bundle(out, threads=1).close()
    assert beside(out) == []


def test_an_existing_bundle_is_refused_before_the_model_is_loaded(
    tiny_model: Path, out: Path, old: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(BundleError, match=r"already a bundle; .*--overwrite"):
        export_decoder(tiny_model, out, **TINY)
    assert content(out) == old


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_or_another_folder_is_left_alone(tiny_model: Path, tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("precious")
    before = content(tmp_path)
    with pytest.raises(BundleError, match=r"could not be written"):
        export_decoder(tiny_model, tmp_path / "file" / "below", **TINY, overwrite=overwrite)
    refuse_to_load(monkeypatch)
    for name, match in (("file", "is a file"), ("folder", "not a sinkring bundle")):
        with pytest.raises(BundleError, match=match):
            export_decoder(tiny_model, tmp_path / name, **TINY, overwrite=overwrite)
    assert content(tmp_path) == before


@pytest.mark.usefixtures("traced_once")
def test_missing_parents_are_made(tiny_model: Path, tmp_path: Path) -> None:
    export_decoder(str(tiny_model), str(tmp_path / "a" / "b" / "bundle"), **TINY)
    open_bundle(tmp_path / "a" / "b" / "bundle", threads=1).close()


@pytest.mark.parametrize("write", ["weights", "graph", "manifest"])
@pytest.mark.usefixtures("traced_once")
def test_a_full_disk_is_one_clear_error(
    tiny_model: Path, out: Path, old: dict[str, bytes], write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target: Any = {"weights": WeightsFile, "graph": exporting.WeightsFile, "manifest": exporting}[write]
    monkeypatch.setattr(target, {"weights": "_store", "graph": "save_graph", "manifest": "replace_text"}[write], full)
    with pytest.raises(BundleError, match="No space left on device") as raised:
        export_decoder(tiny_model, out, **TINY, overwrite=True)
    assert str(out) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert content(out) == old
    assert beside(out) == []


@pytest.mark.parametrize("size_kb", [400, 1650, 1740])
@pytest.mark.usefixtures("traced_once")
def test_a_disk_that_fills_up(tiny_model: Path, tmp_path: Path, size_kb: int) -> None:
    """Real ENOSPC, in the middle of the weights, the graphs, or at the end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        with pytest.raises(BundleError, match="No space left on device"):
            export_decoder(tiny_model, disk / "bundle", **TINY)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sinks": -1}, "sinks=-1: must be 0 or more"),
        ({"window": 0}, "window=0: must be 1 or more"),
        ({"window": -4}, "window=-4"),
        ({"chunk": 0}, "chunk=0: must be 1 or more"),
        ({"batch": 0}, "batch=0: must be 1 or more"),
        ({"slack": -1}, "slack=-1: must be 0 or more"),
    ],
    ids=str,
)
def test_numbers_without_sense_are_refused_before_the_model_is_loaded(
    out: Path, options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(GeometryError, match=match):
        export_decoder("smollm2", out, **options)
    assert not out.exists()


NUMBERS = ("sinks", "window", "chunk", "batch", "slack")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(NUMBERS, (True, "4", 4.0, float("nan"), [4])),
        # Of sinks and window None is the default.
        *itertools.product(("chunk", "batch", "slack"), (None,)),
    ],
    ids=repr,
)
def test_numbers_of_another_type_are_refused(out: Path, name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises((InputError, GeometryError), match=name):
        export_decoder("smollm2", out, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"sinks": 0, "window": 257}, {"sinks": 4, "window": 253}, {"sinks": 300, "window": 4}], ids=str)
def test_more_than_the_model_was_trained_for(tiny_model: Path, out: Path, options: dict[str, int]) -> None:
    with pytest.raises(GeometryError, match=r"the model was trained for 256"):
        export_decoder(tiny_model, out, **options)
    assert not out.exists()


@pytest.mark.parametrize("name", ["chunk", "slack"])
def test_a_ring_of_senseless_size(tiny_model: Path, out: Path, name: str) -> None:
    with pytest.raises(GeometryError, match=name):
        export_decoder(tiny_model, out, **{**TINY, name: 10**9})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"policy": "sliding"}, InputError, "policy 'sliding' is not known; use one of native, streaming"),
        ({"policy": None}, InputError, "policy None"),
        ({"dtype": "fp16"}, UnsupportedError, "dtype 'fp16' is not supported; use one of fp32"),
        ({"dtype": ["fp32"]}, UnsupportedError, r"dtype \['fp32'\] is not supported; use one of fp32"),
        ({"targets": ["onnxruntime", "jetson"]}, UnsupportedError, "target 'jetson' is not known; known: onnxruntime, tensorrt-rtx"),
    ],
    ids=str,
)
def test_unknown_names_are_refused_with_the_known_ones(
    out: Path, options: dict[str, Any], error: type[SinkringError], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(error, match=match):
        export_decoder("smollm2", out, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"policy": "streaming"}, "capacity=32 with policy streaming, whose streams have no end: use policy native"),
        ({"sinks": 4}, "sinks=4 with capacity=32: .* leave out sinks or capacity"),
        ({"sinks": 0}, "sinks=0 with capacity=32"),
        ({"window": 256}, "window=256 with capacity=32"),
        ({"slack": 3}, "slack=3 with capacity=32: any number"),
        ({"capacity": 0, "chunk": 1}, "capacity=0: must be 1 or more"),
        ({"chunk": 33}, "chunk=33 is more than capacity=32: use a chunk of at most 32"),
        ({"chunk": 0}, "chunk=0: must be 1 or more"),
        ({"capacity": 3.5}, r"capacity=3\.5 is float: give a whole number"),
        ({"capacity": True}, "capacity=True is bool"),
    ],
    ids=str,
)
def test_a_capacity_that_makes_no_sense(out: Path, options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(SinkringError, match=match):
        export_decoder("smollm2", out, **{"policy": "native", "capacity": 32, "chunk": 8, **options})


def test_a_capacity_beyond_the_trained_context(tiny_model: Path, out: Path) -> None:
    with pytest.raises(GeometryError, match="capacity=257 is more than the 256 tokens the model was trained for"):
        export_decoder(tiny_model, out, policy="native", capacity=257)
    assert not out.exists()


@pytest.mark.parametrize(
    ("targets", "match"), [([], "targets"), ("onnxruntime", "targets"), (None, "targets"), ([["onnxruntime"]], "targets?")], ids=repr
)
def test_targets_are_a_list_of_names(out: Path, targets: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_load(monkeypatch)
    with pytest.raises(InputError, match=match):
        export_decoder("smollm2", out, targets=targets)


@pytest.mark.usefixtures("traced_once")
def test_a_bundle_for_one_target_alone(tiny_model: Path, out: Path) -> None:
    manifest = export_decoder(tiny_model, out, **TINY, targets=["onnxruntime"])
    assert {graph.target for graph in manifest.graphs} == {"onnxruntime"}
    assert content(out).keys() == {"manifest.json", "weights.bin", "decode.grouped.onnx", "prefill.grouped.onnx"}
    with pytest.raises(BundleError, match=r"no decode graph for target 'tensorrt-rtx', only for \['onnxruntime'\]"):
        open_bundle(out, target="tensorrt-rtx")


def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path, out: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=32)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedError, match=r"'gpt2' is not supported; supported: llama"):
        export_decoder(tmp_path / "gpt2", out, **TINY)
    assert not out.exists()


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (_rope("proportional"), "rope_type 'proportional' is not supported, only default, .*, dynamic, longrope"),
        (_rope("linear", partial_rotary_factor=0.5), r"partial_rotary_factor=0\.5 is not honoured by transformers' llama"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not honoured by transformers' llama"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"is_causal": False}, "is_causal=False is not honoured"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*sliding_attention"),
        ({"embedding_multiplier": 12.0}, r"embedding_multiplier=12\.0 is not honoured"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, r"factor=0\.0.* give 4 of 4 angles per token"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta=nan.* give .* angles per token"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_settings_that_would_be_dropped_are_refused(
    tmp_path: Path, tiny_model: Path, out: Path, config: dict[str, Any], match: str
) -> None:
    model = _with_config(tiny_model, tmp_path / "model", config)
    with pytest.raises(UnsupportedError, match=match):
        export_decoder(model, out, **TINY)
    assert not out.exists()


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path, out: Path, wrong: float) -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight[3, 2] = wrong
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: 1 of its 2048 weights are NaN or infinite"):
        export_decoder(tmp_path / "model", out, **TINY)
    assert not out.exists()


@pytest.mark.parametrize(
    ("where", "match"),
    [
        (None, "out=None is NoneType"),
        (5, "out=5 is int"),
        ("", "out='' is empty"),
        ("a\0b", "holds a NUL"),
        ("x/" + "y" * 241, "a name of 241 bytes .* is too long: use at most 240"),
        ("ü" * 128, "a name of 256 bytes"),
    ],
)
def test_an_out_that_can_be_no_folder(where: Any, match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse_to_load(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=match):
        export_decoder("model", where, **TINY)
    assert list(tmp_path.iterdir()) == []


def test_caches_beyond_this_machine_s_memory(tiny_model: Path, out: Path) -> None:
    with pytest.raises(GeometryError, match=rf"batch={2**40}: its caches take \d+ bytes, \d+ a row, and this machine has \d+ bytes"):
        export_decoder(tiny_model, out, batch=2**40, **TINY)
    assert not out.exists()


_LONGROPE = _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32)


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        (_rope("dynamic"), {"sinks": 2, "window": 8}, "'dynamic' with policy native and sinks=2: the distance to a sink grows"),
        (_LONGROPE, {"sinks": 2, "window": 8}, "'longrope' with policy native and sinks=2: the distance to a sink grows"),
        (_LONGROPE, {"sinks": 0, "window": 33}, "'longrope' with policy native and 33 tokens in the window: after 32 tokens"),
        (_LONGROPE, {"capacity": 33}, "use a window or capacity of at most 32, or policy streaming"),
    ],
    ids=["dynamic, sinks", "longrope, sinks", "longrope, window", "longrope, capacity"],
)
def test_angles_that_would_change_on_the_way_are_refused(
    tmp_path: Path, tiny_model: Path, out: Path, config: dict[str, Any], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedError, match=match):
        export_decoder(_with_config(tiny_model, tmp_path / "model", config), out, policy="native", chunk=4, **options)
    assert not out.exists()


def _with_config(tiny_model: Path, model: Path, config: dict[str, Any]) -> Path:
    model.mkdir()
    (model / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    (model / "config.json").write_text(json.dumps({**json.loads((tiny_model / "config.json").read_text()), **config}))
    return model


@pytest.mark.parametrize("model", ["no-such-model", "/no/such.gguf", None, 5], ids=repr)
def test_a_model_that_is_not_there(out: Path, model: Any) -> None:
    with pytest.raises(SinkringError, match="give a"):
        export_decoder(model, out, **TINY)


def test_the_model_is_left_as_it_was(tiny_model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second trace in one process must not see the hooks of the first, even after a trace that failed."""
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRotaryEmbedding.forward

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama.LlamaForCausalLM, "forward", fail)
        with pytest.raises(Exception, match=r".*"):
            export_decoder(tiny_model, out, **TINY)
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRotaryEmbedding.forward) == before
    assert list(out.parent.iterdir()) == []


def test_the_files_are_what_the_manifest_hashed(tiny_bundle: Path) -> None:
    for file in Manifest.read(tiny_bundle).files:
        assert (sha256_of(tiny_bundle / file.path), (tiny_bundle / file.path).stat().st_size) == (file.sha256, file.bytes)
