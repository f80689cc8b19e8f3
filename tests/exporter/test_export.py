"""export_decoder: what it writes, what it leaves behind when it fails, and that it makes the same bytes twice."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from sinkring.exporter import export as exporting
from sinkring.exporter.bundle_writer import sha256_of
from sinkring.exporter.export import export_decoder
from sinkring.exporter.weights import ALIGNMENT_BYTES, WeightsFile
from sinkring.runtime import open_bundle
from sinkring.runtime.bundle import check_files
from sinkring.runtime.errors import BundleError, UnsupportedError
from sinkring.runtime.manifest import CONTRACT_KEY, Manifest

from tests.conftest import ROOT
from tests.exporter.export_case import TINY, refuse_to_load
from tests.models.tiny import tiny_llama

STAGES = ["loading", "tracing decode", "tracing prefill", "writing the manifest", "checking that everything counts"]


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


def test_two_exports_are_the_same_bytes(tiny_model: Path, tiny_bundle: Path, out: Path) -> None:
    said: list[str] = []
    export_decoder(tiny_model, out, **TINY, progress=said.append)
    assert content(out) == content(tiny_bundle)
    assert [any(line.startswith(stage) for line in said) for stage in STAGES] == [True] * 5


def test_the_manifest_names_all_there_is(tiny_bundle: Path) -> None:
    manifest = Manifest.read(tiny_bundle)
    check_files(tiny_bundle, manifest)
    assert {file.path for file in manifest.files} | {"manifest.json"} == content(tiny_bundle).keys()
    assert {graph.path for graph in manifest.graphs} < {file.path for file in manifest.files}
    assert {(graph.role, graph.target) for graph in manifest.graphs} == {
        (role, target) for role in ("decode", "prefill") for target in ("onnxruntime", "tensorrt", "tensorrt-rtx")
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


@pytest.mark.usefixtures("traced_once")
def test_a_weight_without_effect_fails_the_export(tiny_model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = exporting.trace_step

    def cut_off(*arguments: Any, **options: Any) -> Any:
        traced = trace(*arguments, **options)
        value = traced.graph.initializers["model.model.layers.1.mlp.down_proj.weight"]
        value.const_value = ir.tensor(np.zeros(value.shape.numpy(), np.float32), name=value.name)
        return traced

    monkeypatch.setattr(exporting, "trace_step", cut_off)
    # What goes through a product with zeros is lost; the zeros themselves, once they are others, are not.
    with pytest.raises(UnsupportedError, match=r"^decode\..*: model\.layers\.1\.\S+ has no effect on the logits") as error:
        export_decoder(tiny_model, out, **TINY)
    assert "mlp.down_proj" not in str(error.value)
    assert list(out.parent.iterdir()) == []


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
    assert "decode.heads.onnx" in content(out.parent / left)
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


@pytest.mark.parametrize("fills", ["weights", "graphs", "end"])
@pytest.mark.usefixtures("traced_once")
def test_a_disk_that_fills_up(tiny_model: Path, tmp_path: Path, fills: str) -> None:
    """Real ENOSPC, in the middle of the weights, the graphs, or at the end."""
    export_decoder(tiny_model, tmp_path / "whole", **TINY)
    pages = {path.name: -(-path.stat().st_size // 4096) for path in (tmp_path / "whole").iterdir()}
    weights, whole = pages["weights.bin"], sum(pages.values())
    size_kb = 4 * {"weights": weights // 2, "graphs": (weights + whole) // 2, "end": whole - 1}[fills]
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


@pytest.mark.usefixtures("traced_once")
def test_a_bundle_for_one_target_alone(tiny_model: Path, out: Path) -> None:
    manifest = export_decoder(tiny_model, out, **TINY, targets=["onnxruntime"])
    assert {graph.target for graph in manifest.graphs} == {"onnxruntime"}
    assert content(out).keys() == {"manifest.json", "weights.bin", "decode.heads.onnx", "prefill.heads.onnx"}
    with pytest.raises(BundleError, match=r"no decode graph for target 'tensorrt-rtx', only for \['onnxruntime'\]"):
        open_bundle(out, target="tensorrt-rtx")
