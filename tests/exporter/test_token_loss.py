"""The loss of a token: by hand, and the same however a text is cut into calls."""

from pathlib import Path

import numpy as np
import pytest
from sinkring.exporter.token_loss import stream_losses, token_loss
from sinkring.runtime import open_bundle

from tests.exporter.tiny_bundle import shared_tiny

TOKENS = 70


def test_the_loss_is_that_of_the_softmax() -> None:
    logits = np.log(np.array([[1, 2, 5], [6, 1, 1]], np.float32))
    assert token_loss(logits, np.array([1, 0])) == pytest.approx([np.log(8 / 2), np.log(8 / 6)], abs=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1000, 998, -1000]], np.float32)
    assert token_loss(logits, np.array([1])) == pytest.approx([2 + np.log(1 + np.exp(-2))], abs=1e-5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_tiny(tmp_path_factory, sinks=2, window=4, chunk=4)


def losses(bundle: Path, tokens_a_call: int, shift: int = 0) -> np.ndarray:
    ids = np.random.default_rng(0).integers(0, 97, TOKENS + 1)
    with open_bundle(bundle, threads=1) as decoder, decoder.stream() as stream:
        if shift:
            stream.feed(ids[:shift])
        return np.concatenate(list(stream_losses(stream, ids[:-1], ids[1:], tokens_a_call)))


@pytest.mark.parametrize("tokens_a_call", [2, 3, 4, 7, TOKENS])
def test_scored_in_chunks_is_scored_token_by_token(bundle: Path, tokens_a_call: int) -> None:
    """The ring wraps eleven times; single tokens run the decode graph and longer calls the prefill graph."""
    one_by_one = losses(bundle, 1)
    assert losses(bundle, tokens_a_call) == pytest.approx(one_by_one, abs=1e-4)
    assert one_by_one.std() > 1, "losses so much alike that a wrong one would look right"


def test_a_stream_that_has_seen_other_tokens_scores_otherwise(bundle: Path) -> None:
    """The control: what 1e-4 tells apart."""
    assert np.abs(losses(bundle, 4, shift=1) - losses(bundle, 4)).max() > 0.1
