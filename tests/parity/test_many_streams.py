"""Invariant I4 for a crowd: 64 streams of one bundle under random joins, leaves, resets, steps, feeds and rollbacks equal their solo runs.

The run is that of scripts/soak_streams.py, a tenth as long; its result over 20,000 calls is in docs/results/soak-streams.json.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sinkring.runtime import open_bundle

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak_streams.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_streams", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bundle(soak: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = soak.export_tiny(tmp_path_factory.mktemp("soak"))
    return path


def test_each_stream_equals_its_solo_run_and_nothing_grows(soak: ModuleType, bundle: Path) -> None:
    result = soak.soak(bundle, 2000, seed=1)
    print(result)
    assert not soak.failures(result)
    assert result["rows"] == 64
    assert result["streams_at_the_end"] > 32
    assert result["their_tokens"]["median"] > 3 * result["capacity_slots"], "too short to have wrapped thrice"
    assert set(result["calls_by_kind"]) == set(soak.EVENTS)


def test_controls_are_seen(soak: ModuleType, bundle: Path) -> None:
    """One id that the solo run is given wrong, and one row whose idle slot is not put back, are loud."""
    with open_bundle(bundle, threads=1) as decoder, open_bundle(bundle, threads=1) as reference:
        run = soak.Soak(decoder, seed=2)
        run.run(300)
        logits = run.step(np.arange(len(run.streams)))
        stream = max(run.streams, key=lambda stream: stream.position)
        ids = run.ids_of(stream)
        assert soak.off_by(logits[stream], ids, reference) <= soak.TOLERANCE
        wrong = ids.copy()
        wrong[-20] = (wrong[-20] + 1) % 97
        assert soak.off_by(logits[stream], wrong, reference) > 100 * soak.TOLERANCE
        # A wrapped stream idles, with what its neighbours' step writes to its next slot left there; then it takes back some tokens.
        decode = decoder.backend.decode
        decoder.backend.decode = lambda idle=(): decode()
        try:
            for _ in range(30):
                run.step(np.array([index for index, other in enumerate(run.streams) if other is not stream]))
        finally:
            decoder.backend.decode = decode
        slack = decoder.slack_tokens
        stream.rollback(slack)
        stream.feed(ids[-slack:][:-1])
        stream.rollback(slack - 1)
        stream.sample()
        assert soak.off_by(stream._logits, ids[:-slack], reference) > 100 * soak.TOLERANCE
