"""A bundle gains engines: the files, the manifest, and what happens when something is wrong."""

import dataclasses
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sinkring.exporter import build
from sinkring.exporter.build import build_engine
from sinkring.runtime.bundle import check_files
from sinkring.runtime.errors import BuildError, BundleError, UnsupportedError
from sinkring.runtime.manifest import MANIFEST_NAME, Manifest

from tests.exporter import hand_bundle
from tests.exporter.hand_bundle import CHUNK, WEIGHTS, ring_graph, write_bundle

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    graphs = {"decode": ring_graph(layers=2), "prefill": ring_graph(layers=2, tokens=CHUNK, attend="folded")}
    return write_bundle(tmp_path / "bundle", graphs, layers=2)


def files_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_both_graphs_become_engines_and_are_recorded(bundle: Path) -> None:
    before = files_below(bundle)
    reports = build_engine(bundle)
    assert [(report.role, report.sm, report.target) for report in reports] == [
        ("decode", 89, "tensorrt-rtx"),
        ("prefill", 89, "tensorrt-rtx"),
    ]

    manifest = Manifest.read(bundle)
    after = files_below(bundle)
    for report, engine in zip(reports, manifest.engines, strict=True):
        assert report.faults == ()
        assert report.plan.kernels > 0
        assert report.engine_bytes == (bundle / report.engine_path).stat().st_size
        assert report.builder_version == trt.__version__
        assert report.dtype == "float32"
        assert engine.path == report.engine_path == f"engines/tensorrt-rtx-{trt.__version__}-sm89-fp32/{report.role}.engine"
        assert engine.graph_sha256 == before[f"{report.role}.onnx"]
        assert manifest.file(engine.path).sha256 == after[engine.path]
        assert manifest.file(engine.report).sha256 == after[engine.report]
        saved = json.loads((bundle / engine.report).read_text())
        assert saved["plan"]["layers"][1]["updates"][0] == {
            "cache": "cache.1.k",
            "in_place": True,
            "kernel": report.plan.layers[1].updates[0].kernel,
        }
    assert reports[1].profiles == {"tokens": ((1, 1), (1, CHUNK), (1, CHUNK)), "rows": ((1,), (1,), (CHUNK,))}
    assert reports[0].profiles == {}
    # Nothing else changed and nothing half-written is left.
    assert {path: sha for path, sha in after.items() if path in before and path != MANIFEST_NAME} == {
        path: sha for path, sha in before.items() if path != MANIFEST_NAME
    }
    assert set(after) - set(before) == {path for engine in manifest.engines for path in (engine.path, engine.report)}


def test_building_again_replaces_and_other_sms_stay(bundle: Path) -> None:
    build_engine(bundle, sm=[89, 120])
    build_engine(bundle, sm=[89])
    manifest = Manifest.read(bundle)
    assert sorted((engine.role, engine.sm) for engine in manifest.engines) == [
        ("decode", 89),
        ("decode", 120),
        ("prefill", 89),
        ("prefill", 120),
    ]
    paths = [file.path for file in manifest.files]
    assert len(paths) == len(set(paths))
    for file in manifest.files:
        assert hashlib.sha256((bundle / file.path).read_bytes()).hexdigest() == file.sha256


def test_an_engine_of_another_builder_version_goes_with_its_files(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trt, "__version__", "1.0.0")
        build_engine(bundle)
    assert (bundle / "engines/tensorrt-rtx-1.0.0-sm89-fp32/decode.engine").is_file()
    build_engine(bundle)
    (only,) = (bundle / "engines").iterdir()
    assert only.name == f"tensorrt-rtx-{trt.__version__}-sm89-fp32", "the folder of the other version is gone with its last file"
    assert sorted(path.name for path in only.iterdir()) == ["decode.engine", "decode.json", "prefill.engine", "prefill.json"]
    assert {engine.builder_version for engine in Manifest.read(bundle).engines} == {trt.__version__}


def test_a_plan_that_copies_a_cache_leaves_a_report_and_no_engine(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, {"decode": ring_graph(scale=1.0)})
    manifest_before = (bundle / MANIFEST_NAME).read_bytes()
    with pytest.raises(BuildError, match=r"layer 0: kernel __myl_Move\S+ rewrites the whole of cache\.0\.k .* 4096 bytes") as caught:
        build_engine(bundle)
    (left,) = (bundle / "engines").rglob("*.*json")
    assert left.relative_to(bundle).as_posix() == f"engines/tensorrt-rtx-{trt.__version__}-sm89-fp32/decode.failed.json"
    assert left.name in str(caught.value)
    assert json.loads(left.read_text())["faults"]
    assert (bundle / MANIFEST_NAME).read_bytes() == manifest_before


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(5, 1, 10), (2, 1, 80), (2, 1, 256), (2, 2, 64)])
def test_a_shape_without_a_fused_kernel_is_named(
    heads: int, kv_heads: int, head_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("HEADS", heads), ("KV_HEADS", kv_heads), ("HEAD_SIZE", head_size)):
        monkeypatch.setattr(hand_bundle, name, size)
    monkeypatch.setattr(hand_bundle, "ring_states", partial(hand_bundle.ring_states, kv_heads=kv_heads))
    bundle = write_bundle(tmp_path, {"decode": ring_graph(kv_heads=kv_heads)})
    words = rf"has no fused attention kernel for H={heads} query heads, G={kv_heads} KV heads, D={head_size},.*run the bundle on"
    with pytest.raises(BuildError, match=words) as caught:
        build_engine(bundle)
    assert "export again" not in str(caught.value)
    assert Manifest.read(bundle).engines == ()


def test_builds_side_by_side_all_stay_in_the_manifest(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for processes: each opens the lock for itself."""
    read, sms, meeting = Manifest.read, (86, 89, 120), threading.Barrier(3)
    compiled = build.compile_engine

    def compile_and_meet(*arguments: Any) -> Any:
        with building:
            made = compiled(*arguments)
        meeting.wait(60)
        return made

    def read_slowly(folder: Path) -> Manifest:
        manifest = read(folder)
        time.sleep(0.05)
        return manifest

    building = threading.Lock()
    monkeypatch.setattr(build, "compile_engine", compile_and_meet)
    monkeypatch.setattr(build.Manifest, "read", read_slowly)
    with ThreadPoolExecutor(len(sms)) as pool:
        list(pool.map(lambda sm: build_engine(bundle, sm=[sm]), sms))
    manifest = read(bundle)
    assert sorted((engine.sm, engine.role) for engine in manifest.engines) == [(sm, role) for sm in sms for role in ("decode", "prefill")]
    check_files(bundle, manifest)


@pytest.mark.parametrize("when", ["between two builds", "during one"])
def test_a_graph_that_changes_after_the_first_check_is_refused(bundle: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = build.compile_engine

    def compile_and_change(*arguments: Any) -> Any:
        made = compiled(*arguments)
        if when == "between two builds":
            (bundle / "prefill.onnx").write_bytes(b"changed")
        else:
            write_bundle(bundle, {"decode": ring_graph(layers=1)})
        return made

    monkeypatch.setattr(build, "compile_engine", compile_and_change)
    match = r"prefill\.onnx: has sha256" if when == "between two builds" else r"decode\.onnx: its sha256 was .* exported again meanwhile"
    with pytest.raises(BundleError, match=match):
        build_engine(bundle)
    assert [engine.role for engine in Manifest.read(bundle).engines] == (["decode"] if when == "between two builds" else [])


def test_a_failed_report_goes_once_the_build_succeeds(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, {"decode": ring_graph(write="where")})
    with pytest.raises(BuildError):
        build_engine(bundle)
    write_bundle(tmp_path, {"decode": ring_graph()})
    build_engine(bundle)
    assert not list((bundle / "engines").rglob("*.failed.json"))


@pytest.mark.parametrize("name", ["decode.onnx", WEIGHTS])
def test_a_changed_file_is_refused_before_anything_is_built(bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(bytes(content))
    with pytest.raises(BundleError, match=f"{name}: has sha256"):
        build_engine(bundle)
    assert not (bundle / "engines").exists()


def test_a_missing_file_is_refused(bundle: Path) -> None:
    (bundle / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=f"{WEIGHTS}: is in manifest.json but not in the bundle"):
        build_engine(bundle)


def test_a_bundle_for_another_target_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, {"decode": ring_graph()}, target="onnxruntime")
    with pytest.raises(BundleError, match=r"no decode graph for target 'tensorrt-rtx', only for \['onnxruntime'\]"):
        build_engine(bundle)


def test_unknown_targets_and_sms_are_refused(bundle: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tensorrt, tensorrt-10\.3, tensorrt-rtx"):
        build_engine(bundle, "tensorrt-edge")
    with pytest.raises(UnsupportedError, match="sm=90"):
        build_engine(bundle, sm=[89, 90])
    with pytest.raises(UnsupportedError, match="no compute capability named"):
        build_engine(bundle, sm=[])
    assert not (bundle / "engines").exists()


def test_an_unknown_dynamic_axis_is_refused(tmp_path: Path) -> None:
    model = ring_graph()
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "rows_of_streams"
    with pytest.raises(UnsupportedError, match=r"input 'position' has the dynamic axis 'rows_of_streams'"):
        build_engine(write_bundle(tmp_path, {"decode": model}))


def test_a_state_that_the_graph_lacks_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, {"decode": ring_graph(layers=1)}, layers=2)
    with pytest.raises(BundleError, match=r"decode\.onnx: has no tensor 'cache\.1\.k'"):
        build_engine(bundle)


def test_progress_names_graph_and_sm(bundle: Path) -> None:
    phases: set[str] = set()
    build_engine(bundle, progress=lambda phase, done, steps: phases.add(phase.split(":")[0]))
    assert phases == {"decode sm89", "prefill sm89"}


def test_a_write_that_fails_leaves_the_bundle_as_it_was(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_below(bundle)

    def broken(path: Path) -> str:
        raise OSError("disk gone")

    monkeypatch.setattr(build, "_sync_folder", broken)
    with pytest.raises(OSError, match="disk gone"):
        build_engine(bundle)
    after = files_below(bundle)
    assert {path: after[path] for path in before} == before
    assert Manifest.read(bundle).engines == ()
    assert not [path for path in after if path.endswith(".part")]


def test_the_report_matches_its_json(bundle: Path) -> None:
    report = build_engine(bundle)[0]
    assert json.loads(report.to_json()) == json.loads(json.dumps(dataclasses.asdict(report)))
