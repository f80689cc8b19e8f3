"""A raw prompt begins as the model's texts began: with a BOS only where the tokenizer file puts one."""

from pathlib import Path

import pytest
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Tokenizer as TokenizerInfo
from sinkring.runtime.prompt import adds_bos, encode_prompt
from sinkring.runtime.text import TextCodec
from tokenizers import Tokenizer, models, pre_tokenizers, processors

BOS = 3


def codec(folder: Path, *, adds: bool, bos_id: int | None = BOS) -> TextCodec:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    assert tokenizer.token_to_id("<s>") == BOS
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec.open(folder, TokenizerInfo("tokenizer.json", None, bos_id, ()))


def test_the_tokenizer_s_own_bos_is_put_in_front_once(tmp_path: Path) -> None:
    adding = codec(tmp_path, adds=True)
    assert encode_prompt(tmp_path, adding, "a b").tolist() == [BOS, 0, 1]
    assert encode_prompt(tmp_path, adding, "<s>a b").tolist() == [BOS, 0, 1]


def test_a_bos_that_the_tokenizer_does_not_add_is_left_out(tmp_path: Path) -> None:
    assert encode_prompt(tmp_path, codec(tmp_path, adds=False), "a b").tolist() == [0, 1]


def test_a_model_without_bos_gets_none(tmp_path: Path) -> None:
    plain = codec(tmp_path, adds=False, bos_id=None)
    assert not adds_bos(tmp_path, plain.info)


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        encode_prompt(tmp_path, codec(tmp_path, adds=True), "")
