"""Graphs that take embedded rows against eager PyTorch with `inputs_embeds`: rows that are no token's, both policies, two streams.

Of each way in which a model treats its embedding one: as it is, scaled by the embedding itself (Gemma 3) or behind it (Granite, in the
layers' code), normalized behind it (BLOOM), and speech models, whose steps are never tokens alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sinkring.exporter.export import export_decoder
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.models.registry import families, supported_here
from sinkring.models.token_call import text_config
from sinkring.runtime import Decoder, open_bundle

from tests.models.tiny_families import find_row, tiny_model
from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import TARGETS, text

SINKS, WINDOW, TOKENS = 2, 4, 54
PLAIN = [("gemma3_text", "streaming"), ("gemma3_text", "native"), ("granite", "native"), ("bloom", "streaming")]
SPEECH = tuple(name for name in ("kyutai_speech_to_text", "voxtral_realtime") if supported_here(families()[name]))
CASES = [*PLAIN, *((name, "native") for name in SPEECH)]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_rows_are_those_of_eager_pytorch(name: str, policy: Any, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "model")
    geometry = {"sinks": SINKS, "window": WINDOW} if find_row(name).has_full_layers else {}
    inputs = {} if name in SPEECH else {"inputs": "embeddings"}
    export_decoder(tmp_path / "model", tmp_path / "bundle", policy=policy, chunk=3, batch=2, targets=TARGETS, **geometry, **inputs)  # type: ignore[arg-type]
    oracle = streaming_logits if policy == "streaming" else masked_dense_logits
    ids = [text(TOKENS, seed=row) for row in range(2)]
    generator = np.random.default_rng(2)
    heard = [generator.standard_normal((TOKENS, text_config(model).hidden_size)).astype(np.float32) for _ in ids]
    actual = expected = rows = ids
    for target in TARGETS:
        with open_bundle(tmp_path / "bundle", target=target, threads=1) as decoder:
            rows = [decoder.embed(given) + sound for given, sound in zip(ids, heard, strict=True)]
            expected = [oracle(model, torch.from_numpy(fed), SINKS, WINDOW).numpy() for fed in rows]
            actual = _drive(decoder, rows)
        for row in range(2):
            assert_parity(actual[row], expected[row], what=f"{name}, {policy}, {target}, row {row}")
    wrong = {
        "the tokens alone": oracle(model, torch.from_numpy(ids[0]), SINKS, WINDOW),
        "the sound alone": oracle(model, torch.from_numpy(heard[0]), SINKS, WINDOW),
        "the row before": oracle(model, torch.from_numpy(np.roll(rows[0], 1, axis=0)), SINKS, WINDOW),
    }
    for what, logits in wrong.items():
        assert_loudly_wrong(actual[0], logits.numpy(), f"{name}: {what}")


def _drive(decoder: Decoder, rows: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Two streams side by side, never at one position: chunks, single rows, and steps of both. float32 [N,V] each."""
    parts: list[list[NDArray[np.float32]]] = [[], []]
    with decoder.stream() as one, decoder.stream() as two:
        streams = (one, two)
        for length in (7, 1, 4, 2):
            for row in (0, 1):
                at = streams[row].position
                parts[row].append(streams[row].feed_embeddings(rows[row][at : at + length + row], all_logits=True))
        while one.position < TOKENS:
            going = {row: stream for row, stream in enumerate(streams) if stream.position < TOKENS}
            logits = decoder.step({stream: rows[row][stream.position] for row, stream in going.items()})
            for row, stream in going.items():
                parts[row].append(logits[stream][None])
    return [np.concatenate(part) for part in parts]


@pytest.mark.parametrize(("weights", "tied"), [("int8", True), ("int4", False)])
def test_weights_in_blocks(weights: Any, tied: bool, tmp_path: Path) -> None:
    """A table that is the head, too, has the head's numbers; one of its own stays as it is."""
    from sinkring.exporter.validate import validate_bundle

    model = tiny_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", chunk=3, sinks=2, window=4, weights=weights, inputs="embeddings")
    found = validate_bundle(tmp_path / "bundle", 40)
    assert found.passed, found.failures
    with open_bundle(tmp_path / "bundle") as decoder:
        moved = np.abs(decoder.embed(range(97)) - model.get_input_embeddings().weight.numpy()).max()
    assert (moved > 1e-4) == tied


@pytest.mark.skipif("kyutai_speech_to_text" not in SPEECH, reason="not in this transformers")
def test_codes_are_embedded_as_kyutai_does_it(tmp_path: Path) -> None:
    model: Any = tiny_model("kyutai_speech_to_text")
    model.model.embed_tokens.embed_tokens.weight[-1] = 0.5  # so that silence is heard
    model.save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", chunk=4)
    ids, silence = text(8), model.config.audio_pad_token_id
    codes = np.random.default_rng(3).integers(0, 11, (8, 2))
    codes[2, 1] = codes[5, 0] = silence
    with open_bundle(tmp_path / "bundle", threads=1) as decoder, decoder.stream() as stream:
        for heard in (codes, np.full((8, 2), silence)):
            fed = torch.from_numpy(np.concatenate([ids[:, None], heard], axis=1))[None]
            rows = decoder.embed(ids, heard)
            np.testing.assert_allclose(rows, model.model.embed_tokens(fed)[0].numpy(), atol=1e-6)
            stream.reset()
            # As long as the window: what transformers itself computes.
            assert_parity(stream.feed_embeddings(rows, all_logits=True), model(input_ids=fed).logits[0].numpy())
        np.testing.assert_allclose(decoder.embed(ids), rows, atol=1e-6)


@pytest.mark.skipif("voxtral_realtime" not in SPEECH, reason="not in this transformers")
def test_voxtral_hears_what_transformers_lets_it_hear(tmp_path: Path) -> None:
    """Its own audio encoder and projector, outside the bundle, over as many tokens as the window."""
    model: Any = tiny_model("voxtral_realtime")
    model.save_pretrained(tmp_path / "model")
    export_decoder(tmp_path / "model", tmp_path / "bundle", chunk=4)
    ids = text(7)
    sound = torch.randn(1, 7 * model.config.downsample_factor, 16, generator=torch.Generator().manual_seed(0))
    audio = model.get_audio_features(encoder_inputs_embeds=sound).pooler_output[0].numpy()
    expected = model(input_ids=torch.from_numpy(ids)[None], encoder_inputs_embeds=sound).logits[0].numpy()
    with open_bundle(tmp_path / "bundle", threads=1) as decoder, decoder.stream() as stream:
        assert_parity(stream.feed_embeddings(decoder.embed(ids) + audio, all_logits=True), expected)
        stream.reset()
        assert_loudly_wrong(stream.feed(ids, all_logits=True), expected, "no sound")
