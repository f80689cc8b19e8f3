"""Each check can fail: whatever a saboteur breaks, the check that is there for it says so, and afterwards nothing stays broken."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter import check_conformance
from sinkring.exporter.conformance.saboteurs import SABOTEURS, Saboteur
from sinkring.exporter.conformance.suite import CHECKS
from sinkring.runtime.backends.onnxruntime import OnnxRuntimeBackend
from sinkring.runtime.manifest import Manifest

from tests.exporter.tiny_bundle import shared_tiny

BUNDLES: dict[str, dict[str, Any]] = {
    "streaming": {"policy": "streaming", "sinks": 2, "window": 4, "chunk": 3},
    "native, two rows": {"policy": "native", "sinks": 2, "window": 4, "chunk": 3, "batch": 2},
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shared_tiny(tmp_path_factory, **options) for name, options in BUNDLES.items()}


def test_every_invariant_has_a_saboteur() -> None:
    assert {invariant for saboteur in SABOTEURS for invariant in saboteur.invariants} == set(CHECKS)
    assert len({saboteur.name for saboteur in SABOTEURS}) == len(SABOTEURS)


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda saboteur: saboteur.name)
def test_the_check_fails_under_its_own_saboteur(bundles: dict[str, Path], name: str, saboteur: Saboteur) -> None:
    manifest, suite = Manifest.read(bundles[name]), "full" if "full" in saboteur.needs else "quick"
    files = {path: path.read_bytes() for path in bundles[name].rglob("*") if path.is_file()}
    if saboteur.unfit(bundles[name], manifest, suite == "full"):
        others = {
            "row-crosstalk": manifest.batch == 1,
            "scale-shifted": manifest.weights.format == "fp32",
            "row-beside": True,
            "row-early": True,
        }
        assert others.get(saboteur.name), "all others have something to break in both bundles"
        return
    policy = {"I2": "native", "I3": "streaming"}
    own = [invariant for invariant in saboteur.invariants if policy.get(invariant, manifest.policy) == manifest.policy]
    result = check_conformance(bundles[name], suite, only=own, sabotage=saboteur.name, budget_s=0.1 if suite == "full" else 60)
    assert not result.passed
    for check in result.checks:
        assert check.passed is False, f"{saboteur.name}: {check.invariant} passes, {check.detail}"
        assert "did not come to its end" not in check.tried, f"{saboteur.name}: noticed by accident only, {check.detail}"
        assert check.detail
    assert {path: path.read_bytes() for path in files} == files, "only a copy may be broken"


def test_nothing_stays_broken(bundles: dict[str, Path]) -> None:
    """Runs after the others of this file, which have all patched the runtime of this very process."""
    result = check_conformance(bundles["native, two rows"], only=["I2", "I4", "I5", "I6", "I7", "I11"])
    assert result.passed, [check for check in result.checks if check.passed is False]


def test_a_check_that_ends_in_an_error_has_failed(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_subject: object) -> None:
        raise ValueError("of another kind")

    monkeypatch.setitem(CHECKS, "I5", broken)  # type: ignore[arg-type]
    result = check_conformance(bundles["streaming"], only=["I5"])
    assert not result.passed
    assert result.checks[0].detail == "ended in ValueError: of another kind"
    assert '"worst": null' in result.to_json()


def test_what_is_taken_once_is_not_growth_and_a_little_at_each_step_is(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """I8 counts the allocations of the whole process: another thread of it may take some at any time, once."""
    decode, steps, kept = OnnxRuntimeBackend.decode, 0, []

    def once(self: Any, idle: Sequence[int] = ()) -> None:
        nonlocal steps
        decode(self, idle)
        steps += 1
        if steps == 300:
            kept.append(np.ones(1 << 20))

    def always(self: Any, idle: Sequence[int] = ()) -> None:
        decode(self, idle)
        kept.append([])

    for keeping, sound in ((once, True), (always, False)):
        monkeypatch.setattr(OnnxRuntimeBackend, "decode", keeping)
        (check,) = check_conformance(bundles["streaming"], only=["I8"]).checks
        assert check.passed is sound, check.detail
    assert kept[0].nbytes == 8 << 20
