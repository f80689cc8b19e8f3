"""The ids of a validation: the bundle's own tokenizer over one text that every Python has."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from sinkring.exporter import reference_text, validate_bundle
from sinkring.exporter.export import export_decoder
from sinkring.exporter.reference_text import python_topics, read_reference_ids
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import tiny_llama

WORDS = ("<unk>", "<s>", "the", "a", "of", "is", "to", "in", "and", ".", ",", "`", "``", "statement", "expression", "assert")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(folder / "model")
    tiny_llama().save_pretrained(folder / "model")
    export_decoder(folder / "model", folder / "bundle", sinks=2, window=4, chunk=3)
    return folder / "bundle"


def test_text_is_long_and_in_a_fixed_order() -> None:
    text = python_topics()
    assert len(text) > 400_000
    assert text.startswith(topics[min(topics)])
    assert text.endswith(topics[max(topics)])


def test_ids_are_the_texts_by_the_bundles_tokenizer(bundle: Path) -> None:
    found = read_reference_ids(bundle, Manifest.read(bundle), 300)
    assert found.ids.dtype == np.int64
    assert found.ids.shape == (300,)
    assert found.ids[0] == WORDS.index("<s>")
    assert "pydoc_data.topics" in found.origin
    assert WORDS.index("the") in found.ids
    assert np.array_equal(read_reference_ids(bundle, Manifest.read(bundle), 20).ids, found.ids[:20])


def test_validation_runs_on_the_text(bundle: Path) -> None:
    result = validate_bundle(bundle, 40)
    assert result.passed, result.failures
    assert "pydoc_data.topics" in result.ids


def test_text_that_is_too_short_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_text, "python_topics", lambda: "the assert statement")
    with pytest.raises(InputError, match=r"steps=5, but the reference text has 4 tokens; use steps <= 4"):
        validate_bundle(bundle, 5)
    assert len(read_reference_ids(bundle, Manifest.read(bundle), 4).ids) == 4
