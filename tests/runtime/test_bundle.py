"""Damaged bundles: each is one line that names the file, both values, and what to do."""

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import open_bundle
from sinkring.runtime.bundle import check_consistent
from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest

GRAPH = "decode.heads.onnx"
WEIGHTS = "weights.bin"
MANIFEST = "manifest.json"


@pytest.fixture
def bundle(tmp_path: Path, tiny_bundle: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def refused(bundle: Path, **options: Any) -> str:
    with pytest.raises(BundleError) as raised:
        open_bundle(bundle, threads=1, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert re.search(r"export again|make one|install|use ", message), f"does not say what to do: {message}"
    return message


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def rehash(bundle: Path) -> None:
    """Make the manifest agree with the files again, so that what follows is the next line of defence."""
    from sinkring.exporter.bundle_writer import describe_file

    for file in (manifest := json.loads((bundle / MANIFEST).read_text()))["files"]:
        described = describe_file(bundle, file["path"])
        file.update(bytes=described.bytes, sha256=described.sha256)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def test_an_untouched_copy_opens(bundle: Path) -> None:
    """The control: it is the damage that is refused."""
    open_bundle(bundle, threads=1).close()
    rehash(bundle)
    open_bundle(str(bundle), threads=1, verify=False).close()


@pytest.mark.parametrize("name", [GRAPH, WEIGHTS, "prefill.heads.onnx", "decode.fused.onnx"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_file(bundle: Path, name: str, verify: bool) -> None:
    (bundle / name).unlink()
    assert f"{bundle / name}: is listed in the manifest but missing" in refused(bundle, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [0, 5000])
def test_truncated_weights(bundle: Path, verify: bool, size: int) -> None:
    whole = (bundle / WEIGHTS).read_bytes()
    (bundle / WEIGHTS).write_bytes(whole[:size])
    assert f"{bundle / WEIGHTS}: has {size} bytes, the manifest says {len(whole)}" in refused(bundle, verify=verify)


@pytest.mark.parametrize("name", [GRAPH, WEIGHTS])
@pytest.mark.parametrize("at", [0, 1000, -1])
def test_one_flipped_bit(bundle: Path, name: str, at: int) -> None:
    flip(bundle / name, at)
    message = refused(bundle)
    found, listed = re.findall(r"[0-9a-f]{12}\.\.\.", message)
    assert f"{bundle / name}: sha256 is" in message
    assert found != listed


def test_without_verify_only_the_hashes_are_skipped(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest["files"][0].update(sha256="0" * 64))
    refused(bundle)
    with open_bundle(bundle, threads=1, verify=False) as decoder:
        assert np.isfinite(decoder.stream().feed([1, 2, 3])).all()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("\x00\x01\x02", "not valid JSON"),
        ("[]", "format is 'list', expected 'sinkring-bundle'"),
        ("{}", "format is None, expected 'sinkring-bundle'"),
        ('{"format": "onnx"}', "format is 'onnx', expected 'sinkring-bundle'"),
    ],
)
def test_a_manifest_that_is_none(bundle: Path, text: str, match: str) -> None:
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match=match) as raised:
        open_bundle(bundle)
    assert str(bundle / MANIFEST) in str(raised.value)


def test_a_manifest_that_is_no_text(bundle: Path) -> None:
    data = bytearray((bundle / MANIFEST).read_bytes())
    data[100] = 0xFF
    (bundle / MANIFEST).write_bytes(data)
    assert f"{bundle / MANIFEST}: not UTF-8" in refused(bundle)


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5])
def test_a_manifest_of_another_version(bundle: Path, version: object) -> None:
    edit(bundle, lambda manifest: manifest.update(format_version=version))
    assert f"format version is {version!r}, this sinkring reads 1" in refused(bundle)


def test_folders_that_are_no_bundle(tmp_path: Path, bundle: Path) -> None:
    assert "no such bundle folder" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "has no manifest.json" in refused(tmp_path / "empty")
    assert "no such bundle folder" in refused(bundle / WEIGHTS)
    (bundle / MANIFEST).unlink()
    (bundle / MANIFEST).mkdir()
    assert "has no manifest.json" in refused(bundle)


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x0a" * 500])
@pytest.mark.parametrize("name", [GRAPH, "prefill.heads.onnx"])
def test_a_graph_that_onnxruntime_refuses(bundle: Path, name: str, content: bytes) -> None:
    (bundle / name).write_bytes(content)
    rehash(bundle)
    assert f"{bundle / name}: onnxruntime " in refused(bundle, one_session=False)


def test_weights_that_end_before_the_graph_does(bundle: Path) -> None:
    (bundle / WEIGHTS).write_bytes((bundle / WEIGHTS).read_bytes()[:8192])
    rehash(bundle)
    assert ".onnx: onnxruntime " in refused(bundle)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(batch=2), "cache.0.k: rows is 1, expected batch, 2"),
        (lambda m: m.update(batch=0), r"batch, chunk is \(0, 4\), expected 1 or more"),
        (lambda m: m.update(chunk=12), "chunk is 12, expected at most 11"),
        (lambda m: m["rings"][0]["geometry"].update(slots=13), r"cache.0.k: slots is \(16,\), expected those of its ring, 15"),
        (lambda m: m["rings"][0]["geometry"].update(slots=3), "ring slots=3 is less than window=4"),
        (lambda m: m["states"][1].update(kind="linear"), "cache.0.v: kind is 'linear', expected that of its ring, .* wraps=True"),
        (lambda m: m["states"][1].update(kind="linear", ring=None), "cache.0.v: ring is None"),
        (lambda m: m["states"][1].update(ring=1), "cache.0.v: ring is 1, expected one of the 1 rings"),
        (lambda m: m["states"][1].update(ring=-1), "cache.0.v: ring is -1"),
        (lambda m: m["states"][1].update(batch_axis=4), "cache.0.v: batch_axis is 4"),
        (lambda m: m["states"][1].update(dtype="float31"), "cache.0.v: dtype is 'float31', expected one of float32"),
        (lambda m: m["states"][1].update(dtype="float16"), r"'cache.0.v' is float32 \(1, 2, 16, 8\) in the graph, float16"),
        (lambda m: m["states"][1].update(shape=[1, 3, 16, 8]), r"float32 \(1, 2, 16, 8\) in the graph, float32 \(1, 3, 16, 8\)"),
        (lambda m: m["states"][1].update(name="cache.9.v"), "'cache.0.v' is in the graph but not in the manifest"),
        (lambda m: m["states"][1].update(updated="nothing"), "'cache.0.v.updated' is in the graph but not in the manifest"),
        (lambda m: m["states"].pop(), "'cache.1.v' is in the graph but not in the manifest"),
        (lambda m: m["model"].update(vocab_size=96), r"'logits' is float32 \(1, None, 97\) in the graph, float32 \(1, None, 96\)"),
        (lambda m: m["rings"][0].update(write_index="write"), "'write' is in the manifest but not in the graph"),
        (lambda m: m["graphs"][0].update(path="other.onnx"), "other.onnx is named but not listed under files"),
        (lambda m: m["files"][0].update(path="../outside"), "'../outside', expected a path inside the bundle|not listed"),
        (lambda m: m["files"].append({"path": "/etc/hostname", "bytes": 1, "sha256": ""}), "expected a path inside the bundle"),
        (lambda m: m.update(graphs=[]), "no decode graph for target 'onnxruntime'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verify", [True, False])
def test_a_manifest_that_disagrees_with_itself_or_the_graphs(
    bundle: Path, change: Callable[[dict[str, Any]], object], match: str, verify: bool
) -> None:
    edit(bundle, change)
    message = refused(bundle, verify=verify)
    assert re.search(match, message), message
    assert str(bundle) in message or "export again" in message


def names_in(field: str) -> Callable[[dict[str, Any], str], object]:
    engine = {
        "role": "decode",
        "target": "t",
        "sm": 1,
        "path": "e",
        "builder_version": "",
        "graph_path": GRAPH,
        "graph_sha256": "",
        "report": "r",
    }
    tokenizer = {"tokenizer": WEIGHTS, "chat_template": None, "bos_id": None, "stop_ids": []}
    changes: dict[str, Callable[[dict[str, Any], str], object]] = {
        "files": lambda m, path: m["files"].append({"path": path, "bytes": 1, "sha256": ""}),
        "graphs": lambda m, path: m["graphs"][0].update(path=path),
        "engines": lambda m, path: m.update(engines=[{**engine, "path": path}]),
        "engines: report": lambda m, path: m.update(engines=[{**engine, "report": path}]),
        "engines: graph": lambda m, path: m.update(engines=[{**engine, "graph_path": path}]),
        "tokenizer": lambda m, path: m.update(tokenizer={**tokenizer, "tokenizer": path}),
        "tokenizer: chat_template": lambda m, path: m.update(tokenizer={**tokenizer, "chat_template": path}),
    }
    return changes[field]


OUTSIDE = ["/etc/hostname", "../x", "a/../../x", "a\0b", "a" * 256, "ü" * 128, "a/" * 600 + "x", "", ".", "\ud800"]


@pytest.mark.parametrize(
    "field", ["files", "graphs", "engines", "engines: report", "engines: graph", "tokenizer", "tokenizer: chat_template"]
)
def test_every_path_is_inside_the_bundle(tiny_bundle: Path, field: str) -> None:
    raw = json.loads((tiny_bundle / MANIFEST).read_text())
    for path in OUTSIDE:
        changed = copy.deepcopy(raw)
        names_in(field)(changed, path)
        with pytest.raises(BundleError) as raised:
            check_consistent(tiny_bundle, Manifest.from_json(json.dumps(changed), MANIFEST))
        assert f"{field}: path is {path[:80]!r}, expected a path inside the bundle" in str(raised.value)


def test_paths_within_the_bundle_are_taken(bundle: Path) -> None:
    name = "deep/er/" + "n" * 255
    edit(bundle, lambda m: m["files"].append({"path": name, "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}))
    (bundle / name).parent.mkdir(parents=True)
    (bundle / name).touch()
    open_bundle(bundle, threads=1).close()


def test_an_engine_that_is_not_listed(bundle: Path) -> None:
    edit(bundle, lambda m: names_in("engines")(m, "engines/x.engine"))
    assert "engines/x.engine is named but not listed under files" in refused(bundle)


@pytest.mark.parametrize("name", [WEIGHTS, GRAPH])
def test_a_link_out_of_the_bundle(bundle: Path, tmp_path: Path, name: str) -> None:
    (bundle / name).rename(tmp_path / name)
    (bundle / name).symlink_to(tmp_path / name)
    assert f"{name}: is a link out of the bundle; copy the file into it" in refused(bundle)


def test_a_bundle_behind_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bundle)
    open_bundle(tmp_path / "link", threads=1).close()


def swap_updated(manifest: dict[str, Any]) -> None:
    first, second = manifest["states"][:2]
    first["updated"], second["updated"] = second["updated"], first["updated"]


def geometry(**numbers: int) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["rings"][0]["geometry"].update(numbers)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (geometry(sinks_tokens=1, slots=15), "was made for rings"),
        (geometry(window_tokens=3), "was made for rings"),
        (lambda manifest: manifest.update(policy="native"), 'was made for policy "streaming", the manifest says "native"'),
        (lambda manifest: manifest.update(position_limit=2**70), "was made for position_limit"),
        (lambda manifest: manifest.update(chunk=2), "was made for chunk 4, the manifest says 2"),
        (lambda manifest: manifest["states"][0].update(initial=7.0), "was made for states"),
        (swap_updated, "was made for states"),
        (lambda manifest: manifest["files"].pop(), "weights.bin is named but not listed"),
    ],
)
def test_numbers_that_would_write_wrong_slots_are_those_of_the_graphs(
    bundle: Path, change: Callable[[dict[str, Any]], object], match: str
) -> None:
    """Each of these is consistent in itself, and gave wrong logits or a wrong limit without a word."""
    edit(bundle, change)
    assert match in refused(bundle)
