"""Scores and sink shares against a numpy attention over torch's own queries and keys."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sinkring.exporter.attention_probe import AttentionProbe
from sinkring.models.patch import attention_implementation
from sinkring.models.source import load_model
from sinkring.runtime import open_bundle
from sinkring.runtime.errors import UnsupportedError

from tests.exporter.tiny_bundle import export_tiny

SINKS, WINDOW = 2, 8
PAST, LOOKED_AT = 21, 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("probe"), policy="native", sinks=SINKS, window=WINDOW, chunk=4)


def eager_weights(model_folder: Path, ids: np.ndarray) -> np.ndarray:
    """[L, H, N, N]: the attention of the eager model under the window's mask."""
    model = load_model(str(model_folder)).model
    tokens = len(ids)
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None]
    seen = (key <= query) & ((key < SINKS) | (key > query - WINDOW))
    mask = torch.from_numpy(np.where(seen, 0.0, -np.inf)).float()
    with attention_implementation(model, "eager"), torch.no_grad():
        out = model(torch.from_numpy(ids)[None], attention_mask=mask[None, None], output_attentions=True, use_cache=False)
    return np.stack([layer[0].numpy() for layer in out.attentions])


def test_the_share_is_that_of_the_eager_model(bundle: Path) -> None:
    ids = np.random.default_rng(2).integers(0, 97, PAST + LOOKED_AT)
    with open_bundle(bundle, threads=1) as decoder:
        stream = decoder.stream()
        stream.feed(ids[:PAST])
        state = stream.capture()[1]
        kept = {name: array.copy() for name, array in state.items()}
        seen = AttentionProbe(bundle, decoder.manifest, threads=1).look(state, PAST, ids[PAST:])
    shares = eager_weights(bundle.parent / "model", ids)[:, :, PAST:, :SINKS].sum(-1)
    assert seen.sink_share_by_layer == pytest.approx(shares.mean(axis=(1, 2)), abs=1e-4)
    assert seen.sink_share == pytest.approx(shares.mean(), abs=1e-4)
    assert 0.02 < seen.sink_share < 0.98
    assert all(np.array_equal(kept[name], state[name]) for name in kept), "the stream's own state was changed"


def test_scores_are_those_that_give_the_weights(bundle: Path) -> None:
    """The weights show the scores only up to a shift: here they are computed from the model's own queries and keys."""
    ids = np.random.default_rng(2).integers(0, 97, PAST + 1)
    with open_bundle(bundle, threads=1) as decoder:
        stream = decoder.stream()
        stream.feed(ids[:PAST])
        probe = AttentionProbe(bundle, decoder.manifest, threads=1)
        seen = probe.look(stream.capture()[1], PAST, ids[PAST:])
    model = load_model(str(bundle.parent / "model")).model
    attention = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(torch.from_numpy(ids)))
    query, key = (projection(hidden).unflatten(-1, (-1, 8)).transpose(0, 1) for projection in (attention.q_proj, attention.k_proj))
    angles = np.arange(PAST + 1)[:, None] * model.model.rotary_emb.inv_freq.double().numpy()
    turned = [(_complex(side) * np.exp(1j * angles)) for side in (query, key)]
    past = [*range(SINKS), *range(PAST + 1 - WINDOW, PAST + 1)]
    scores = np.einsum("hd,hld->hl", turned[0][:, -1], turned[1].repeat(2, axis=0)[:, past].conj()).real / np.sqrt(8)
    assert probe._scores[0].max() == pytest.approx(scores.max(), abs=1e-3)
    assert seen.largest_score >= probe._scores[0].max()
    assert seen.typical_score < seen.largest_score


def _complex(x: torch.Tensor) -> np.ndarray:
    """[.., D] as [.., D/2] complex numbers: dimension i turns with i + D/2."""
    array = x.double().numpy()
    return array[..., : array.shape[-1] // 2] + 1j * array[..., array.shape[-1] // 2 :]


def test_several_rows_are_refused(tmp_path: Path) -> None:
    bundle = export_tiny(tmp_path, sinks=SINKS, window=WINDOW, chunk=4, batch=2)
    with open_bundle(bundle, threads=1) as decoder, pytest.raises(UnsupportedError, match="2 rows"):
        AttentionProbe(bundle, decoder.manifest)
