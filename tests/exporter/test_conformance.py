"""A right bundle holds every invariant, in both policies, with one row and with two, and its result says what was tried."""

import json
from pathlib import Path
from typing import Any

import pytest
from sinkring.exporter import check_conformance
from sinkring.exporter.conformance.findings import TITLES, Conformance
from sinkring.exporter.conformance.suite import CHECKS
from sinkring.runtime.errors import BundleError, InputError, UnsupportedError

from tests.exporter.invoke_cli import invoke
from tests.exporter.tiny_bundle import shared_tiny

# M is 6 with C = 8, but for the tight ring, which has no slack at all.
BUNDLES: dict[str, dict[str, Any]] = {
    "streaming": {"policy": "streaming", "sinks": 2, "window": 4, "chunk": 3},
    "native, two rows": {"policy": "native", "sinks": 2, "window": 4, "chunk": 3, "batch": 2},
    "streaming, no slack": {"policy": "streaming", "sinks": 3, "window": 5, "chunk": 1},
    "linear, two rows": {"policy": "native", "capacity": 40, "chunk": 4, "batch": 2},
}


@pytest.fixture(scope="module", params=BUNDLES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conformance:
    return check_conformance(shared_tiny(tmp_path_factory, **BUNDLES[request.param]))


def test_right_bundle_holds_every_invariant(found: Conformance) -> None:
    assert [check.invariant for check in found.checks] == [f"I{number}" for number in range(1, 13)] == list(CHECKS) == list(TITLES)
    assert [(check.invariant, check.detail) for check in found.checks if check.passed is False] == []
    assert found.passed
    other = {"native": "I3", "streaming": "I2"}[found.policy]
    wraps = all(ring.geometry.wraps for ring in found.rings)
    assert [check.invariant for check in found.checks if check.passed is None] == [other, *([] if wraps else ["I9"])]
    rows = {check.invariant: check for check in found.checks}
    assert found.scale > 1
    for name in ("I1", "I12", *(["I9"] if wraps else []), {"native": "I2", "streaming": "I3"}[found.policy]):
        worst = rows[name].worst
        assert worst is not None
        # Two ways of adding the same numbers in float32 are never equal everywhere: a zero would mean that nothing was compared.
        assert 0 < worst <= found.tolerance / 5
        assert rows[name].tolerance == found.tolerance == pytest.approx(1e-4 * found.scale)
    for name in ("I4", "I5", "I6", "I7", "I10", "I11"):
        assert (rows[name].worst, rows[name].tolerance) == (0, 0)
    assert all(check.tried for check in found.checks)


@pytest.mark.parametrize("name", ["streaming", "native, two rows"])
def test_float16_caches_hold_every_invariant(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = check_conformance(shared_tiny(tmp_path_factory, **BUNDLES[name], cache_dtype="fp16"))
    assert [(check.invariant, check.detail) for check in found.checks if check.passed is False] == []
    rows = {check.invariant: check for check in found.checks}
    assert (found.dtype, found.cache_dtype) == ("float32", "float16")
    assert found.tolerance == pytest.approx(3e-3 * found.scale)
    assert rows["I9"].passed
    # Turning the keys to another age rounds them once more.
    assert rows["I9"].tolerance == 2 * found.tolerance
    assert 1e-4 * found.scale < (rows["I9"].worst or 0)
    for invariant in ("I4", "I5", "I6", "I7", "I10", "I11"):
        assert rows[invariant].worst == 0


def test_bfloat16_holds_every_invariant(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = check_conformance(shared_tiny(tmp_path_factory, **BUNDLES["native, two rows"], dtype="bf16"))
    assert [(check.invariant, check.detail) for check in found.checks if check.passed is False] == []
    rows = {check.invariant: check for check in found.checks}
    assert (found.dtype, found.cache_dtype) == ("bfloat16", "bfloat16")
    assert found.tolerance == pytest.approx(9.6e-2 * found.scale)
    # The proof is of the graphs without their roundings, which would hide a wrong window.
    assert (rows["I2"].worst or 1) <= (rows["I2"].tolerance or 0) == pytest.approx(1e-4 * found.scale)
    assert 1e-3 * found.scale < (rows["I9"].worst or 0) < found.tolerance
    for invariant in ("I4", "I5", "I6", "I7", "I10", "I11"):
        assert rows[invariant].worst == 0


@pytest.mark.parametrize("saboteur", ["window-short", "sink-dropped", "ignored-weight"])
def test_sabotage_is_seen_through_bfloat16(tmp_path_factory: pytest.TempPathFactory, saboteur: str) -> None:
    bundle = shared_tiny(tmp_path_factory, **BUNDLES["native, two rows"], dtype="bf16")
    only = ["I10"] if saboteur == "ignored-weight" else ["I2"]
    found = check_conformance(bundle, only=only, sabotage=saboteur)
    assert [check.passed for check in found.checks] == [False]


def test_result_is_json(found: Conformance) -> None:
    raw = json.loads(found.to_json())
    assert raw["passed"] is True
    assert [row["title"] for row in raw["checks"]] == list(TITLES.values())
    assert (raw["suite"], raw["backend"], raw["sabotage"]) == ("quick", "onnxruntime", None)
    assert set(raw["versions"]) == {"sinkring", "onnxruntime", "torch", "transformers", "numpy"}
    assert raw["machine"]["cpu"]


def test_full_suite_tries_more_within_its_budget(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = shared_tiny(tmp_path_factory, **BUNDLES["streaming"])
    seen: list[str] = []
    result = check_conformance(
        bundle, "full", only=["I7", "I8", "I10"], budget_s=1.0, progress=lambda stage, done, total: seen.append(stage)
    )
    assert result.passed, result.checks
    rollback, growth, everything = result.checks
    assert rollback.tried.startswith("k = 1, 2 at")
    assert "of 100,000 as many as fit into 1 s" in growth.tried
    # Two layers: the four weights of a layer that are split into seven, two norms; last norm, head, embedding; tables of four digits.
    assert "decode.fused.onnx: 25 weights" in everything.tried
    assert {"oracle", "I7: rolled back = never fed", "I8", "I10: decode.fused.onnx"} <= set(seen)


def test_command_prints_a_row_for_each_invariant(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = shared_tiny(tmp_path_factory, **BUNDLES["streaming"])
    ended = invoke("validate", bundle, "--suite", "quick", "--only", "I1", "--only", "I2", "--only", "I7")
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[-1] == "passed"
    assert any(line.startswith("I7") and TITLES["I7"] in line and line.endswith("yes") for line in lines)
    assert any(line.startswith("I2") and line.endswith("not of this bundle") for line in lines)
    assert "I1 tried: 46 tokens in calls of T = 1, 3, 4, 5, 12 and mixed" in ended.out
    broken = invoke("validate", bundle, "--suite", "quick", "--only", "I7", "--sabotage", "rollback-off-by-one")
    assert broken.status == 1
    assert "failed: I7, rolled back = never fed: after a rollback of" in broken.out
    assert broken.out.endswith("failed: 1 of 1 invariants\n")
    as_json = invoke("validate", bundle, "--suite", "quick", "--only", "I7", "--sabotage", "rollback-off-by-one", "--json")
    assert as_json.status == 1
    assert json.loads(as_json.out)["passed"] is False
    assert json.loads(as_json.out)["sabotage"] == "rollback-off-by-one"


def test_sabotage_is_listed_but_not_advertised() -> None:
    listed = invoke("validate", "any", "--sabotage", "list")
    assert listed.status == 0
    assert "float32-positions" in listed.out
    assert "sabotage" not in invoke("validate", "--help").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--suite", "slow"), "suite 'slow' is not known; use one of quick, full"),
        (("--suite", "quick", "--only", "I13"), "invariant 'I13' is not known"),
        (("--suite", "quick", "--steps", "0"), "--steps does nothing with --suite"),
        (("--suite", "quick", "--target", "tensorrt-rtx"), "--target does nothing with --suite"),
        (("--backend", "onnxruntime"), "--backend does nothing without --suite"),
        (("--only", "I1"), "--only does nothing without --suite"),
        (("--suite", "quick", "--budget", "0"), "budget_s=0"),
        (("--suite", "quick", "--sabotage", "nonesuch"), "--sabotage 'nonesuch' is not known"),
        (("--suite", "quick", "--sabotage", "row-crosstalk"), "needs a bundle of two rows or more"),
    ],
)
def test_command_refuses(tmp_path_factory: pytest.TempPathFactory, arguments: tuple[str, ...], says: str) -> None:
    ended = invoke("validate", shared_tiny(tmp_path_factory, **BUNDLES["streaming"]), *arguments)
    assert ended.status == 2
    (line,) = ended.errors
    assert says in line


def test_what_is_the_users_to_mend_is_raised(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = shared_tiny(tmp_path_factory, **BUNDLES["streaming"])
    with pytest.raises(BundleError, match="no such bundle"):
        check_conformance(tmp_path / "none")
    with pytest.raises(UnsupportedError, match="nonesuch"):
        check_conformance(bundle, backend="nonesuch")
    with pytest.raises(InputError, match="'I0'"):
        check_conformance(bundle, only=["I0"])
    with pytest.raises(BundleError, match="--model"):
        check_conformance(bundle, model=str(tmp_path / "none"))
