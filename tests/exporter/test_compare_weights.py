"""compare_weights: figures that a plain computation of them gives, and bundles that cannot be compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter.compare_weights import compare_weights
from sinkring.exporter.export import export_decoder
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.runtime import open_bundle
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest

from tests.exporter.invoke_cli import invoke
from tests.models.tiny import tiny_llama

SIZES: dict[str, Any] = {"sinks": 2, "window": 8, "chunk": 4}
TOKENS = 31


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32 and int8, of one model."""
    folder = tmp_path_factory.mktemp("weights")
    tiny_llama(vocab=96).save_pretrained(folder / "model")
    for weights in ("fp32", "int8"):
        export_decoder(folder / "model", folder / weights, weights=weights, **SIZES)  # type: ignore[arg-type]
    return folder


def log_probabilities(bundle: Path, ids: np.ndarray) -> np.ndarray:
    with open_bundle(bundle) as decoder, decoder.stream() as stream:
        logits = stream.feed(ids, all_logits=True).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_figures_are_those_of_the_whole_text_at_once(bundles: Path) -> None:
    found = compare_weights(bundles / "int8", bundles / "fp32", tokens=TOKENS)
    ids = read_reference_ids(bundles / "fp32", Manifest.read(bundles / "fp32"), TOKENS).ids
    right, other = (log_probabilities(bundles / name, ids[:-1]) for name in ("fp32", "int8"))
    rows = np.arange(TOKENS - 1)
    assert found.reference.nats == pytest.approx(-right[rows, ids[1:]].mean(), rel=1e-4)
    assert found.compared.nats == pytest.approx(-other[rows, ids[1:]].mean(), rel=1e-4)
    assert found.compared.kl == pytest.approx((np.exp(right) * (right - other)).sum(axis=1).mean(), rel=1e-2)
    assert found.compared.kl > 1e-5
    assert found.compared.top1 == (right.argmax(axis=1) == other.argmax(axis=1)).mean()
    assert (found.reference.kl, found.reference.top1) == (0.0, 1.0)
    assert found.to_dict()["bytes_saved"] == found.reference.weight_bytes - found.compared.weight_bytes > 0


def test_the_command_prints_both(bundles: Path) -> None:
    ended = invoke("compare-weights", bundles / "int8", "--against", bundles / "fp32", "--tokens", 20)
    assert ended.status == 0, ended.err
    assert "int8" in ended.out
    assert "fp32" in ended.out


def test_bundles_that_differ_in_more_than_weights(bundles: Path, tmp_path: Path) -> None:
    export_decoder(bundles / "model", tmp_path / "wide", **{**SIZES, "window": 9})
    with pytest.raises(InputError, match=r"differ in their sinks and windows: \[\(2, 9, True\)\], \[\(2, 8, True\)\]"):
        compare_weights(bundles / "int8", tmp_path / "wide", tokens=TOKENS)
    with pytest.raises(InputError, match="tokens=1: must be 2 or more"):
        compare_weights(bundles / "int8", bundles / "fp32", tokens=1)
