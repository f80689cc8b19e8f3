"""Each policy against eager PyTorch that shares no code with it; then the figures, by hand; then the command."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sinkring.exporter import measure_perplexity
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.perplexity import Perplexity
from sinkring.exporter.perplexity_policies import Setup, open_policy
from sinkring.models.oracle import masked_dense_logits, streaming_logits_stepwise
from sinkring.models.source import load_model
from sinkring.runtime.errors import InputError, SinkringError

from tests.exporter.invoke_cli import invoke

SINKS, WINDOW, TOKENS = 2, 6, 40
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,"


@pytest.fixture(scope="module")
def setup(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(str(speaking_model), SINKS, WINDOW, tmp_path_factory.mktemp("bundles"), chunk=4, recompute_every=3, threads=1)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    letters = np.random.default_rng(3).choice(list(ALPHABET), 400)
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(letters), encoding="utf-8")
    return path


def expected_losses(setup: Setup, ids: np.ndarray) -> dict[str, np.ndarray]:
    """By eager attention under explicit masks, by StreamingLLM token by token, and by a whole pass for each recomputed token."""
    model, before = load_model(setup.model).model, torch.from_numpy(ids[:-1])
    last = SINKS + WINDOW
    logits = {
        "dense": masked_dense_logits(model, before, 0, len(before)),
        "window": masked_dense_logits(model, before, 0, last),
        "native": masked_dense_logits(model, before, SINKS, WINDOW),
        "streaming": streaming_logits_stepwise(model, before, SINKS, WINDOW),
        "recompute": torch.stack([model(before[None, max(0, at + 1 - last) : at + 1]).logits[0, -1] for at in range(len(before))]),
    }
    targets = torch.from_numpy(ids[1:])
    return {name: torch.nn.functional.cross_entropy(rows.double(), targets, reduction="none").numpy() for name, rows in logits.items()}


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, TOKENS + 1)


def test_each_policy_scores_what_eager_pytorch_scores(setup: Setup, ids: np.ndarray) -> None:
    expected = expected_losses(setup, ids)
    for name, wanted in expected.items():
        with open_policy(name, setup) as score:
            found = score(ids)
        scored = np.isfinite(found)
        assert scored.sum() == (len(range(SINKS + WINDOW - 1, TOKENS, 3)) if name == "recompute" else TOKENS)
        assert found[scored] == pytest.approx(wanted[scored], abs=1e-3), name
        # The control: no other policy's losses would do.
        others = [other for other in expected if other != name]
        assert min(np.abs(expected[other] - wanted)[scored].max() for other in others) > 0.01, name
    with open_policy("oracle", setup) as score:
        assert score(ids) == pytest.approx(expected["streaming"], abs=1e-3)


def hand_made(losses: dict[str, list[list[float]]]) -> Perplexity:
    arrays = {name: np.array(rows) for name, rows in losses.items()}
    return Perplexity("model", "text", 1, 1, 1, (0, 9), arrays, describe_machine(), {})


def test_means_and_errors_are_over_starts_once_the_cache_is_full() -> None:
    nan = float("nan")
    found = hand_made({"streaming": [[9, 1, 3], [9, 2, 6]], "recompute": [[nan, nan, 2], [nan, nan, 4]]})
    estimate = found.estimate("streaming")  # 2 and 4
    assert (estimate.nats, estimate.standard_error, estimate.starts) == (3, 1, 2)
    assert estimate.factor == pytest.approx(np.exp(3))
    assert estimate.factor_error == pytest.approx(np.exp(3))
    # On the last position alone: 3 - 2 and 6 - 4.
    assert found.compare("streaming", "recompute").nats == 1.5
    assert found.curve("streaming", bins=3)[0] == (0, 1, 9, 0)
    assert [row[:2] for row in found.curve("recompute", bins=3)] == [(2, 3)], "what was not scored has no place in the curve"


def test_a_single_start_has_no_error(speaking_bundle: Path, text_file: Path) -> None:
    found = measure_perplexity(speaking_bundle, str(text_file), policies=["streaming"], starts=1, tokens=30, threads=1)
    assert found.start_positions == (0,)
    assert np.isnan(found.estimate("streaming").standard_error)
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_bundle_is_scored_as_it_stands(speaking_bundle: Path, text_file: Path, tmp_path: Path) -> None:
    """Its own policy needs no export: with that one alone nothing is written to the folder of bundles."""
    bundles = tmp_path / "bundles"
    found = measure_perplexity(speaking_bundle, str(text_file), policies=["streaming", "oracle"], starts=3, tokens=40, bundles=bundles)
    assert not bundles.exists()
    assert (found.sinks, found.window, found.first_scored) == (2, 8, 9)
    assert abs(found.compare("streaming", "oracle").nats) < 1e-4
    assert found.start_positions[0] == 0
    assert len(set(found.start_positions)) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policies": ["dens"]}, "each must be one of dense"),
        ({"policies": []}, "each must be one of"),
        ({"starts": 0}, "starts=0"),
        ({"tokens": 10}, "sinks + window = 10"),
        ({"tokens": 4000}, "give a longer text"),
        ({"text": "nowhere.txt"}, "nowhere.txt"),
        ({"sinks": 3}, "has its own sinks"),
    ],
)
def test_what_makes_no_sense_is_refused(speaking_bundle: Path, text_file: Path, change: dict, says: str) -> None:
    options = {"text": str(text_file), "policies": ["streaming"], "tokens": 40, **change}
    with pytest.raises(InputError, match=says.replace("+", r"\+")):
        measure_perplexity(speaking_bundle, options.pop("text"), **options)


def test_another_model_than_the_bundles_is_refused(speaking_bundle: Path, text_file: Path, tmp_path: Path) -> None:
    from tests.exporter.tiny_bundle import broken_copy

    def change(raw: dict) -> None:
        raw["model"]["source_sha256"] = "0" * 64

    with pytest.raises(SinkringError, match="was exported from a model with sha256"):
        measure_perplexity(broken_copy(speaking_bundle, tmp_path / "other", change), str(text_file), policies=["streaming"], tokens=40)


def test_the_command_prints_a_table_and_writes_curves(speaking_model: Path, text_file: Path, tmp_path: Path, setup: Setup) -> None:
    options = ("--sinks", SINKS, "--window", WINDOW, "--starts", 2, "--tokens", 60, "--recompute-every", 3, "--bundles", setup.bundles)
    ended = invoke("perplexity", speaking_model, "--text", text_file, *options, "--out", tmp_path / "curves")
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    for policy in ("dense", "window", "recompute", "streaming", "native"):
        assert any(line.startswith(policy) for line in lines), ended.out
    with (tmp_path / "curves" / "perplexity.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["policy"] for row in rows} == {"dense", "window", "recompute", "streaming", "native"}
    assert all(np.isfinite(float(row["log_perplexity_nats"])) for row in rows)
    assert (tmp_path / "curves" / "perplexity.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_speaks_json(speaking_bundle: Path, text_file: Path) -> None:
    ended = invoke("perplexity", speaking_bundle, "--text", text_file, "--policy", "streaming", "--tokens", 40, "--starts", 2, "--json")
    assert ended.status == 0, ended.err
    said = json.loads(ended.out)
    assert said["policies"]["streaming"]["over_reference"]["factor"] == 1
    assert said["first_scored"] == 9


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from sinkring.exporter.perplexity_files import draw_curves

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = replace(hand_made({"streaming": [[1, 2, 3]]}), start_positions=(0,))
    with pytest.raises(SinkringError, match=r"sinkring\[plots\]"):
        draw_curves(found, tmp_path / "curve.png")
