"""An answer says why it ended, which is what the next turn of a chat depends on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from sinkring.runtime.answer import Answer
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Tokenizer as TokenizerInfo
from sinkring.runtime.sampling import SamplingOptions
from sinkring.runtime.stream import Stream
from sinkring.runtime.text import TextCodec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

STOP = -1


class ScriptedStream:
    """Yields the given ids; STOP stands for a stop token, which counts in the position and is not yielded."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.position, self.options = ids, 10, {}

    def generate(self, max_tokens: int, **options: Any) -> Iterator[int]:
        self.options = options
        for id in self.ids[:max_tokens]:
            self.position += 1
            if id == STOP:
                return
            yield id


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextCodec.open(tmp_path, TokenizerInfo("tokenizer.json", None, None, ()))


def answer(codec: TextCodec, ids: list[int], max_tokens: int = 99, stops: tuple[str, ...] = ()) -> Answer:
    return Answer(cast(Stream, cast(Any, ScriptedStream(ids))), codec, max_tokens, SamplingOptions(), stops)


def test_a_stop_token_is_told_from_a_full_length(codec: TextCodec) -> None:
    ids = codec.encode("hé", add_bos=False).tolist()
    stopped = answer(codec, [*ids, STOP, *ids])
    assert list(stopped) == ["h", "", "é", "", ""]
    assert (stopped.tokens, stopped.ended_by, stopped.stop_text) == (3, "stop_token", None)
    full = answer(codec, [*ids, STOP], max_tokens=3)
    assert ("".join(full), full.tokens, full.ended_by) == ("hé", 3, "length")
    cut = answer(codec, ids, max_tokens=2)
    assert ("".join(cut), cut.tokens, cut.ended_by) == ("h\ufffd", 2, "length")


def test_a_stop_string_ends_it_and_is_left_out(codec: TextCodec) -> None:
    ids = codec.encode("one. two. three", add_bos=False).tolist()
    ended = answer(codec, ids, stops=("two!", "tw", "three"))
    assert "".join(ended) == "one. "
    # The tokens of the stop are in the stream.
    assert (ended.tokens, ended.ended_by, ended.stop_text) == (len("one. tw"), "stop_text", "tw")


def test_text_that_only_began_like_a_stop_comes_out_at_the_end(codec: TextCodec) -> None:
    ended = answer(codec, codec.encode("one. tw", add_bos=False).tolist(), stops=("two",))
    assert ("".join(ended), ended.ended_by, ended.stop_text) == ("one. tw", "length", None)


def test_sampling_options_reach_the_stream(codec: TextCodec) -> None:
    stream = ScriptedStream([])
    sampling = SamplingOptions(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=7)
    assert "".join(Answer(cast(Stream, cast(Any, stream)), codec, 5, sampling)) == ""
    asked = {name: getattr(sampling, name) for name in stream.options}
    assert stream.options == asked
    assert set(asked) == {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}


def test_an_empty_stop_string_is_refused(codec: TextCodec) -> None:
    with pytest.raises(InputError, match="empty"):
        answer(codec, [], stops=("",))
