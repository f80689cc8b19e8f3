"""Conformance of bundles with several rings, and of models that place tokens in other ways: sound ones pass, and saboteurs are noticed."""

from pathlib import Path
from typing import Any

import pytest
from sinkring.exporter.conformance.suite import check_conformance
from sinkring.exporter.validate import validate_bundle
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest

from tests.exporter.tiny_bundle import export_tiny
from tests.models.tiny_families import tiny_model

SINKS: dict[str, Any] = {"sinks": 2, "window": 6}
# Each with its model's family: rings of two geometries and two rotary bases; a linear cache beside rings; ALiBi; learned sink logits;
# sliding layers alone; layers that know no position; interleaved pairs in a part of each head, at every age; graphs that take rows.
BUNDLES: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("gemma3_text", {"policy": "streaming", "batch": 2, **SINKS}),
    "linear beside rings": ("ministral", {"policy": "native", "capacity": 48}),
    "alibi": ("bloom", {"policy": "streaming", **SINKS}),
    "alibi, native": ("falcon-alibi", {"policy": "native", **SINKS}),
    "learned sinks": ("gpt_oss", {"policy": "streaming", **SINKS}),
    "sliding": ("starcoder2", {"policy": "native"}),
    "no positions": ("smollm3", {"policy": "streaming", **SINKS}),
    "partial, fp16 caches": ("stablelm", {"policy": "streaming", "cache_dtype": "fp16", **SINKS}),
    "interleaved": ("gptj", {"policy": "native", **SINKS}),
    "embedded rows": ("kyutai_speech_to_text", {"policy": "native"}),
}
# Why an invariant is not of a bundle; the other policy's never is.
NOT_OF = {"linear beside rings": "at most 48 tokens", "alibi, native": "grows with the age"}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: export_tiny(tmp_path_factory.mktemp(family), tiny_model(family), chunk=3, slack=3, **options)
        for name, (family, options) in BUNDLES.items()
    }


@pytest.mark.parametrize("name", BUNDLES)
def test_right_bundle_holds_every_invariant(bundles: dict[str, Path], name: str) -> None:
    # With several rings all that touches a state; else what the family itself decides.
    several = len(Manifest.read(bundles[name]).rings) > 1
    numbers = [number for number in range(1, 13) if number != 11] if several else [1, 2, 3, 9, 10, 12]
    found = check_conformance(bundles[name], only=[f"I{number}" for number in numbers])
    assert [(check.invariant, check.detail) for check in found.checks if check.passed is False] == []
    assert found.passed
    other = {"native": "I3", "streaming": "I2"}[found.policy]
    not_of = {check.invariant: check.tried for check in found.checks if check.passed is None}
    assert set(not_of) == {other, *(["I9"] if name in NOT_OF else [])}
    assert NOT_OF.get(name, "") in not_of.get("I9", "")


@pytest.mark.parametrize("saboteur", ["window-short", "sink-dropped", "slots-as-positions", "float32-positions", "one-form-short"])
def test_saboteurs_of_a_hybrid_are_noticed(bundles: dict[str, Path], saboteur: str) -> None:
    own = {"float32-positions": "I9", "one-form-short": "I12"}.get(saboteur, "I3")
    found = check_conformance(bundles["hybrid"], only=[own], sabotage=saboteur)
    (check,) = found.checks
    assert check.passed is False, check.detail
    assert "did not come to its end" not in check.tried


def test_a_saboteur_that_can_break_nothing_is_refused(bundles: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="ALiBi takes distances from the slots"):
        check_conformance(bundles["alibi"], only=["I9"], sabotage="float32-positions")


def test_validation_has_a_control_for_each_kind_of_layer(bundles: dict[str, Path]) -> None:
    controls = {name: [control.name for control in validate_bundle(bundles[name], 44).controls] for name in ("hybrid", "sliding", "alibi")}
    assert controls == {
        "hybrid": ["window 5", "sinks 1", "sliding window 4"],
        "sliding": ["sliding window 6"],
        "alibi": ["window 5", "sinks 1"],
    }
    result = validate_bundle(bundles["hybrid"], 5)
    assert "steps=5 do not reach past the trained window of 5 tokens, so that one is not tested" in [*result.notes, *result.failures]


def test_rings_are_the_manifests(bundles: dict[str, Path]) -> None:
    result = validate_bundle(bundles["hybrid"], 44)
    assert result.passed, result.failures
    assert result.rings == Manifest.read(bundles["hybrid"]).rings
    assert len(result.rings) == 2
    assert all(control.told_apart for control in result.controls)
