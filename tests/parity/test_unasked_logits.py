"""A prefill graph that is asked for no logits, of every type: the caches hold the same bits, the next call gives the same logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter.export import export_decoder
from sinkring.runtime import Decoder, open_bundle

from tests.models.tiny import tiny_llama
from tests.parity.tiny_bundles import TARGETS, TinyBundle, text

Bundles = Callable[[str], TinyBundle]
TOKENS = 40


def feed_wanting(decoder: Decoder, ids: np.ndarray, wanted: int) -> tuple[dict[str, bytes], np.ndarray]:
    """The caches, in bytes, of ids but the last, fed in chunks of which `wanted` rows are asked; and the last token's logits."""
    geometry, chunk = decoder.manifest.rings[0].geometry, decoder.manifest.chunk
    with decoder.stream() as stream:
        at = 0
        while at < len(ids) - 1:
            length = min(chunk, geometry.room(at), len(ids) - 1 - at)
            asked = min(wanted, length)
            logits = decoder.backend.prefill(stream.row, ids[at : at + length], at, (geometry.slot(at),), asked)
            assert logits.shape == (asked, decoder.manifest.model.vocab_size)
            at += length
        kept = {name: held.tobytes() for name, held in decoder.backend.read_row(stream.row).items()}
        last = decoder.backend.prefill(stream.row, ids[-1:], at, (geometry.slot(at),), 1).copy()
    return kept, last


def holds_the_same(decoder: Decoder) -> None:
    ids = text(TOKENS)
    none, one, several = (feed_wanting(decoder, ids, wanted) for wanted in (0, 1, 3))
    assert none[0] == one[0] == several[0]
    np.testing.assert_array_equal(none[1], one[1])
    assert np.ptp(none[1]) > 0.1
    other = ids.copy()
    other[-2] = (other[-2] + 1) % 97
    changed = feed_wanting(decoder, other, 0)[0]
    assert all(changed[name] != held for name, held in none[0].items()), "the caches do not tell one token from another"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["chunk 4 streaming", "two rows", *(f"chunk 4 native, {kind}" for kind in ("fp16", "all fp16", "all bf16"))]
)
def test_no_logits_of_any_target(parity_bundle: Bundles, name: str, target: str) -> None:
    holds_the_same(parity_bundle(name).decoder(target))


@pytest.mark.parametrize("weights", ["int8", "int8-rows", "int4"])
def test_no_logits_of_quantized_weights(tmp_path: Path, weights: Any) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", chunk=4, sinks=2, window=4, weights=weights, targets=["onnxruntime"])
    with open_bundle(tmp_path / "bundle", threads=1) as decoder:
        holds_the_same(decoder)
