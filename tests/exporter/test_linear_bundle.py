"""A bundle with a linear cache in the hands of each command: export, inspect, run, validate, build."""

import json
from pathlib import Path

import pytest
from sinkring.exporter.build import build_engine
from sinkring.exporter.validate import validate_bundle
from sinkring.runtime.manifest import Manifest

from tests.exporter.invoke_cli import invoke
from tests.exporter.tiny_bundle import shared_tiny

CAPACITY = 29  # C = 32


@pytest.fixture(scope="module")
def spoken(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("linear") / "bundle"
    ended = invoke("export", speaking_model, "--out", out, "--policy", "native", "--capacity", CAPACITY, "--chunk", 4)
    assert ended.status == 0, ended.err
    assert f"linear, full after {CAPACITY} tokens, C=32, B=1" in ended.out
    return out


def test_inspect_shows_the_kind_and_the_limit(spoken: Path) -> None:
    ended = invoke("inspect", spoken)
    assert (ended.status, ended.err) == (0, "")
    assert f"a stream is full after {CAPACITY} tokens" in ended.out
    assert "linear" in ended.out.split()
    found = json.loads(invoke("inspect", spoken, "--json").out)
    (ring,) = found["rings"]
    assert (ring["kind"], ring["most_tokens"], ring["capacity"], ring["sinks_tokens"]) == ("linear", CAPACITY, 32, 0)
    assert ring["allocated_bytes"] == ring["formula_bytes"] == found["cache_bytes"] == 32 * 2 * 2 * 2 * 16 * 4
    assert {state["kind"] for state in found["manifest"]["states"]} == {"linear"}


def test_run_says_all_that_fits_and_then_why_it_stopped(spoken: Path) -> None:
    whole = invoke("run", spoken, "--prompt", "a", "--tokens", CAPACITY - 2)
    assert whole.status == 0, whole.err
    ended = invoke("run", spoken, "--prompt", "a", "--tokens", CAPACITY + 5)
    assert ended.status == 2
    # What is cut off is part of a character, of which the bytes so far are no text.
    assert ended.out.rstrip("\n") == whole.out.rstrip("\n\ufffd") != ""
    (error,) = ended.errors
    assert f"is {CAPACITY + 1}, the bundle's capacity is {CAPACITY}" in error
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("steps", "run"), [(12, 12), (CAPACITY, CAPACITY), (40, CAPACITY)])
def test_validate_runs_up_to_the_capacity(tmp_path_factory: pytest.TempPathFactory, steps: int, run: int) -> None:
    bundle = shared_tiny(tmp_path_factory, policy="native", capacity=CAPACITY, chunk=4)
    result = validate_bundle(bundle, steps)
    assert result.passed, result.failures
    assert result.steps == run
    assert result.notes == (() if steps == run else (f"steps={steps} are more than the capacity: {CAPACITY} were run",))
    assert {(row.region, row.start, row.stop) for row in result.regions} == {("filling", 0, run)}
    # The first token out of sight of the last: the least that a linear cache could lose.
    (control,) = result.controls
    assert (control.name, control.start) == (f"window {run - 1}", run - 1)
    assert control.told_apart


def test_engines_update_a_linear_cache_in_place(tmp_path: Path, speaking_model: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    from sinkring.exporter.export import export_decoder

    bundle = tmp_path / "bundle"
    export_decoder(speaking_model, bundle, policy="native", capacity=509, chunk=16, targets=["tensorrt-rtx"])
    decode, prefill = build_engine(bundle, sm=[89])
    for report in (decode, prefill):
        assert report.faults == ()
        assert all(update.in_place for layer in report.plan.layers for update in layer.updates)
    assert [layer.copies for layer in decode.plan.layers] == [()] * Manifest.read(bundle).model.layers
    assert [layer.fused for layer in decode.plan.layers] == [True, True]
