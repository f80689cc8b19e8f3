"""A linear cache, full attention with a stated capacity: eager PyTorch at every step up to the last token that fits."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from sinkring.models.oracle import masked_dense_logits
from sinkring.runtime.decoder import Decoder, open_bundle

from tests.exporter.tiny_bundle import shared_tiny
from tests.models.tiny import tiny_llama
from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import TARGETS, feed_in_cuts, text

CAPACITY, CHUNK = 21, 8  # C = 24


@pytest.fixture(scope="module", params=TARGETS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    bundle = shared_tiny(tmp_path_factory, policy="native", capacity=CAPACITY, chunk=CHUNK)
    with open_bundle(bundle, target=request.param, threads=1) as opened:
        yield opened


@cache
def model() -> Any:
    return tiny_llama()


def dense(ids: np.ndarray, window: int) -> np.ndarray:
    """float32 [N,V] of the model, each token seeing the last `window`: all of them where that is N or more."""
    return masked_dense_logits(model(), torch.from_numpy(ids), 0, window).numpy()


@pytest.mark.parametrize("cuts", [(1,), (CHUNK,), (CAPACITY,), (1, 3, 2, 9), (5, 1, 8)], ids=str)
def test_logits_are_those_of_the_whole_sequence(decoder: Decoder, cuts: tuple[int, ...]) -> None:
    ids = text(CAPACITY, seed=2)
    actual = feed_in_cuts(decoder, ids, cuts)
    assert_parity(actual, dense(ids, CAPACITY), what=f"cuts {cuts}")
    plain = model()(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert_parity(actual, plain, what="the model as it is")
    assert_loudly_wrong(actual[-1:], dense(ids, CAPACITY - 1)[-1:], "the first token forgotten at the last")


def test_a_chunk_may_start_anywhere(decoder: Decoder) -> None:
    ids = text(CAPACITY, seed=3)
    expected = dense(ids, CAPACITY)
    for start in range(1, CAPACITY):
        with decoder.stream() as stream:
            stream.feed(ids[:start])
            assert_parity(stream.feed(ids[start:], all_logits=True), expected[start:], what=f"one call from {start}")
