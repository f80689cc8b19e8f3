"""What a user tells the builder reaches it, on its real configuration, and one code builds for both packages."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sinkring.exporter import build
from sinkring.exporter.build import build_engine
from sinkring.exporter.builder_options import BuilderOptions
from sinkring.exporter.engine_builder import compile_engine
from sinkring.runtime.errors import BundleError, InputError
from sinkring.runtime.manifest import Manifest

from tests.exporter.enterprise import Enterprise, rtx
from tests.exporter.hand_bundle import ring_graph, write_bundle

# The package says so of every call that has to do with timings.
pytestmark = pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX:DeprecationWarning")


class Recorder:
    """The configuration that a build has used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.configs: list[Any] = []
        builder = rtx.Builder
        recorder = self

        class Watched(builder):
            def create_builder_config(self) -> Any:
                recorder.configs.append(builder.create_builder_config(self))
                return recorder.configs[-1]

        monkeypatch.setattr(module, "Builder", Watched, raising=False)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", {"decode": ring_graph()}) / "decode.onnx"


def test_options_are_set_on_the_real_configuration(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, rtx)
    compile_engine(rtx, "tensorrt-rtx", graph, 89, {}, options=BuilderOptions(5, 64))
    compile_engine(rtx, "tensorrt-rtx", graph, 89, {})
    told, untold = recorder.configs
    workspace = rtx.MemoryPoolType.WORKSPACE
    assert (told.builder_optimization_level, told.get_memory_pool_limit(workspace)) == (5, 64 << 20)
    assert untold.builder_optimization_level != 5
    assert untold.get_memory_pool_limit(workspace) != 64 << 20
    for config in recorder.configs:
        assert config.max_aux_streams == 0
        assert config.get_flag(rtx.BuilderFlag.REQUIRE_USER_ALLOCATION)
        assert not config.get_flag(rtx.BuilderFlag.TF32)


def test_tensorrt_is_built_for_by_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(tmp_path / "bundle", {"decode": ring_graph()}, target="tensorrt")
    enterprise = Enterprise()
    recorder = Recorder(monkeypatch, enterprise)
    monkeypatch.setitem(sys.modules, "tensorrt", enterprise)
    monkeypatch.setattr(build, "present_sm", lambda: 90)
    monkeypatch.setattr("sinkring.exporter.engine_builder.present_sm", lambda: 90)
    timings = tmp_path / "timings" / "cache"
    for _ in range(2):
        (report,) = build_engine(bundle, "tensorrt", optimization_level=1, timing_cache=timings)
        assert timings.stat().st_size > 0
    assert (report.engine_path, report.faults) == ("engines/tensorrt-11.4.1-sm90-fp32/decode.engine", ())
    assert [config.builder_optimization_level for config in recorder.configs] == [1, 1]
    assert recorder.configs[0].num_compute_capabilities == 0
    (engine,) = Manifest.read(bundle).engines
    assert (engine.target, engine.sm, engine.builder_version) == ("tensorrt", 90, "11.4.1")
    assert json.loads((bundle / engine.report).read_text())["optimization_level"] == 1
    assert sorted(path.name for path in timings.parent.iterdir()) == ["cache"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimization_level": 6}, "optimization_level=6: must be a whole number, 0 to 5"),
        ({"optimization_level": -1}, "optimization_level=-1"),
        ({"optimization_level": True}, "optimization_level=True"),
        ({"workspace_mib": 0}, "workspace_mib=0: must be a whole number of MiB, 1 or more"),
        ({"workspace_mib": 1.5}, r"workspace_mib=1\.5"),
        ({"timing_cache": "cache"}, "timing_cache='cache': TensorRT-RTX times nothing when it builds; leave it out"),
    ],
)
def test_options_that_make_no_sense(graph: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_engine(graph.parent, **options)


def test_a_timing_cache_that_cannot_be_read_or_written(graph: Path, tmp_path: Path) -> None:
    for cache in (tmp_path, tmp_path / "file" / "cache"):
        (tmp_path / "file").touch()
        with pytest.raises(BundleError, match=r"timing cache .*: cannot be (read|written)"):
            compile_engine(Enterprise(), "tensorrt", graph, 90, {}, options=BuilderOptions(timing_cache=cache))  # type: ignore[arg-type]


def test_a_timing_cache_of_another_builder(graph: Path, tmp_path: Path) -> None:
    class Config:
        def create_timing_cache(self, content: bytes) -> bytes:
            return content

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            return ignore_mismatch

    with pytest.raises(BundleError, match=r"is not one of TensorRT 11\.4\.1 on this GPU; remove it"):
        BuilderOptions(timing_cache=tmp_path / "cache").apply(Enterprise(), Config())  # type: ignore[arg-type]
