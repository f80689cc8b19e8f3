"""Every promise to a stream, kept by graphs that only read the rings: the suite passes, and notices rows that go astray."""

from pathlib import Path

import pytest
from sinkring.exporter.conformance.suite import check_conformance
from sinkring.exporter.validate import validate_bundle
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest

from tests.exporter.tiny_bundle import shared_tiny

TARGET = "tensorrt-10.3"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """S=2, W=4, two rows."""
    options = {"policy": "streaming", "sinks": 2, "window": 4, "chunk": 4, "batch": 2, "slack": 3}
    return shared_tiny(tmp_path_factory, **options, targets=(TARGET,))


def test_a_sound_bundle_holds_every_invariant(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    assert {(graph.role, graph.target, graph.update, graph.path) for graph in manifest.graphs} == {
        (role, TARGET, "rows", f"{role}.appended.onnx") for role in ("decode", "prefill")
    }
    found = check_conformance(bundle)
    assert [(check.invariant, check.detail) for check in found.checks if check.passed is False] == []
    assert validate_bundle(bundle, 44, target=TARGET).passed


@pytest.mark.parametrize("saboteur", ["row-beside", "row-early", "row-crosstalk"])
def test_saboteurs_are_noticed(bundle: Path, saboteur: str) -> None:
    own = "I4" if saboteur == "row-crosstalk" else "I3"
    (check,) = check_conformance(bundle, only=[own], sabotage=saboteur).checks
    assert check.passed is False, check.detail
    assert "did not come to its end" not in check.tried


def test_a_saboteur_of_rows_has_nothing_to_break_in_other_forms(tmp_path_factory: pytest.TempPathFactory) -> None:
    other = shared_tiny(tmp_path_factory, policy="streaming", sinks=2, window=4, chunk=3)
    with pytest.raises(InputError, match="row-beside needs a bundle whose graphs give out new rows"):
        check_conformance(other, only=["I3"], sabotage="row-beside")
