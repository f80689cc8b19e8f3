"""Text with real tokenizers, trained here in a moment: byte-level BPE, and two of the sentencepiece kind."""

import builtins
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sinkring.runtime.errors import BundleError, DependencyError, InputError, UnsupportedError
from sinkring.runtime.manifest import Tokenizer
from sinkring.runtime.text import IncrementalDecoder, StopMatcher, TextCodec
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "  def f(x):\n\treturn x + 1  # two  spaces\n",
    "Zażółć gęślą jaźń, naïve café, e\u0301 o\u0308",
    "今日は良い天気です。你好世界。",
    "emoji 😀😀 👩‍👩‍👧 🇩🇪 👍🏽",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = ("byte-level", "byte-fallback", "metaspace")

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no ' + message['role'] + ' here') }}{% endif %}{% endfor %}"
)


def train(kind: str) -> tokenizers.Tokenizer:
    if kind == "byte-level":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=360, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=SPECIALS, show_progress=False)
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer
    # As in Llama 2: no pre-tokenizer, characters outside the vocabulary as bytes. The bytes enter through the file.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    raw = json.loads(tokenizer.to_str())
    raw["pre_tokenizer"] = None
    raw["model"]["byte_fallback"] = True
    vocab = raw["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return tokenizer


def id_of(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    id = tokenizer.token_to_id(token)
    assert id is not None, f"{token!r} is not in the test's vocabulary"
    return id


@pytest.fixture(scope="module")
def open_codec(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextCodec]:
    """open_codec(kind, template=None, stops=("<|im_end|>",), bos="<s>")."""
    trained = {kind: train(kind) for kind in KINDS}

    def open_one(kind: str, template: str | None = None, stops: tuple[str, ...] = ("<|im_end|>",), bos: str | None = "<s>") -> TextCodec:
        bundle = tmp_path_factory.mktemp("bundle")
        tokenizer = trained[kind]
        tokenizer.save(str(bundle / "tokenizer.json"))
        if template is not None:
            (bundle / "chat_template.jinja").write_text(template, encoding="utf-8")
        ids = tuple(id_of(tokenizer, stop) for stop in stops)
        info = Tokenizer(
            "tokenizer.json", None if template is None else "chat_template.jinja", None if bos is None else id_of(tokenizer, bos), ids
        )
        return TextCodec.open(bundle, info)

    return open_one


@pytest.fixture(scope="module")
def codecs(open_codec: Callable[..., TextCodec]) -> dict[str, TextCodec]:
    return {kind: open_codec(kind) for kind in KINDS}


# Letters that the corpus knows, spaces in every place, and everything else that Unicode has.
texts = st.text(st.one_of(st.sampled_from("the fox  \n😀é\u0301日👩‍👧\ufffd"), st.characters(exclude_categories=["Cs"])), max_size=40)


def increments(codec: TextCodec, ids: Any, skip_special: bool = True) -> list[str]:
    decoder = IncrementalDecoder(codec, skip_special)
    return [*(decoder.push(int(id)) for id in ids), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_increments_add_up_to_the_full_decode_of_any_text(codecs: dict[str, TextCodec], kind: str, text: str) -> None:
    codec = codecs[kind]
    ids = codec.encode(text, add_bos=True)
    pieces = increments(codec, ids)
    assert "".join(pieces) == codec.decode(ids)
    if kind != "metaspace":  # the one without bytes loses characters that it does not know
        assert "".join(pieces) == text
        assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_increments_of_arbitrary_byte_level_ids_add_up_too(codecs: dict[str, TextCodec], data: st.DataObject, skip_special: bool) -> None:
    """Ids as a bad model may draw them: bytes cut anywhere, special tokens in between, ids outside the vocabulary."""
    codec = codecs["byte-level"]
    bytes_of_emoji = [int(id) for id in codec.encode("\U00010348", add_bos=False)]
    assert len(bytes_of_emoji) > 1
    ids = data.draw(st.lists(st.one_of(st.integers(0, 400), st.sampled_from(bytes_of_emoji)), max_size=60))
    assert "".join(increments(codec, ids, skip_special)) == codec.decode(ids, skip_special)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_comes_out_whole_with_its_last_byte(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    ids = codec.encode("a\U00010348\U00010349b", add_bos=False)
    pieces = increments(codec, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert [piece for piece in pieces if piece] == ["a", "\U00010348", "\U00010349", "b"]
    assert len(pieces) > 8


def test_an_incomplete_character_comes_out_at_the_flush_only(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte-level"]
    decoder = IncrementalDecoder(codec)
    ids = [int(id) for id in codec.encode("\U00010348", add_bos=False)]
    assert [decoder.push(id) for id in ids[:-1]] == [""] * (len(ids) - 1)
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(int(codec.encode("x", add_bos=False)[0])) == "x"


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_words_space_is_the_decoders_and_every_other_space_stays(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    pieces = increments(codec, codec.encode("the dog the fox", add_bos=True))
    assert "".join(pieces) == "the dog the fox"
    assert any(piece.startswith(" ") for piece in pieces)
    # The trap: ids decoded one by one lose every space of a sentencepiece model.
    alone = "".join(codec.decode([id]) for id in codec.encode("the dog the fox", add_bos=True))
    assert (alone == "the dog the fox") == (kind == "byte-level")


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoders_window_is_bounded(codecs: dict[str, TextCodec], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codecs[kind]
    lengths = []
    decode = codec.decode

    def watch(ids: list[int], skip_special: bool) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special)

    monkeypatch.setattr(codec, "decode", watch)
    broken = id_of(codec._backend, {"byte-level": "Ģ", "byte-fallback": "<0x80>", "metaspace": "▁"}[kind])
    decoder = IncrementalDecoder(codec)
    text = "".join(decoder.push(id) for id in [broken] * 300 + [int(id) for id in codec.encode("the fox " * 50, add_bos=True)] * 3)
    assert len(text) > 1000
    assert max(lengths) <= 17


def test_encode_adds_one_bos(open_codec: Callable[..., TextCodec], codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte-level"]
    plain = codec.encode("fox", add_bos=False)
    assert str(plain.dtype) == "int64"
    assert codec.encode("fox", add_bos=True).tolist() == [1, *plain.tolist()]
    assert codec.encode("<s>fox", add_bos=True).tolist() == [1, *plain.tolist()]
    assert codec.encode("", add_bos=True).tolist() == [1]
    assert codec.encode("", add_bos=False).shape == (0,)
    assert open_codec("byte-level", bos=None).encode("fox", add_bos=True).tolist() == plain.tolist()


def test_a_tokenizer_files_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    tokenizer = train("byte-level")
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.open(tmp_path, Tokenizer("tokenizer.json", None, None, ()))
    for text in ("fox", "the fox " * 20):
        assert codec.decode(codec.encode(text, add_bos=False)) == text


def test_ids_and_texts_that_cannot_be(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte-level"]
    with pytest.raises(InputError, match="lone surrogates"):
        codec.encode("\ud800", add_bos=False)
    with pytest.raises(InputError, match="token id -1 is negative"):
        codec.decode([3, -1])
    with pytest.raises(InputError, match="token id -1 is negative"):
        IncrementalDecoder(codec).push(-1)
    assert codec.decode([10_000]) == IncrementalDecoder(codec).push(10_000) == ""


def test_bundles_whose_text_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer.*token ids"):
        TextCodec.open(tmp_path, None)
    with pytest.raises(BundleError, match=r"tokenizer\.json: cannot be read"):
        TextCodec.open(tmp_path, Tokenizer("tokenizer.json", None, None, ()))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a tokenizer file"):
        TextCodec.open(tmp_path, Tokenizer("tokenizer.json", None, None, ()))


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_says_how_to_get_it(open_codec: Callable[..., TextCodec], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = open_codec("byte-level", CHATML)
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    needs = {
        "tokenizers": lambda: TextCodec.open(Path(), codec.info),
        "jinja2": lambda: codec.render_chat([{"role": "user", "content": "hi"}]),
    }
    with pytest.raises(DependencyError, match=f'pip install "{package}>='):
        needs[package]()


def test_a_jinja2_with_a_leaky_sandbox_is_refused(open_codec: Callable[..., TextCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkring.runtime.text.version", lambda _: "3.1.5")
    codec = open_codec("byte-level", CHATML)
    with pytest.raises(DependencyError, match=r"jinja2 is 3\.1\.5"):
        codec.render_chat([{"role": "user", "content": "hi"}])


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=3),
    text=st.text("ab😀", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stops_are_found_however_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    ends = [(end, -len(stop), stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    expected, stop = (text, None) if not ends else (text[: min(ends)[0] + min(ends)[1]], min(ends)[2])
    matcher = StopMatcher(stops)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = ""
    longest = max((len(stop) for stop in stops), default=1)
    for low, high in pairwise(bounds):
        out += matcher.push(text[low:high])
        assert matcher.matched or high - len(out) < longest, "more is held back than a stop can need"
    assert out + matcher.flush() == expected
    assert matcher.matched == stop
    if stop is not None:
        assert matcher.push("more") == ""


def test_text_that_begins_no_stop_is_not_held_back() -> None:
    matcher = StopMatcher(["</answer>"])
    steps = {"x < y": "x < y", " </ans": " ", "wer": "", "!": "</answer!", "</": "", "answer>tail": ""}
    assert {piece: matcher.push(piece) for piece in steps} == steps
    assert matcher.matched == "</answer>"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InputError, match="is empty"):
        StopMatcher(["a", ""])


def test_templates_have_what_transformers_gives_them(open_codec: Callable[..., TextCodec]) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ messages | tojson }}|{{ strftime_now('%Y') | length }}|"
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% endfor %}|{{ tools is none }}|{{ add_generation_prompt }}|{{ undefined_name }}\n  {% if true %}\n|end{% endif %}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "second"}]
    text = open_codec("byte-level", template, stops=("</s>",)).render_chat(messages, add_generation_prompt=False)
    assert text == f"<s>|</s>|{json.dumps(messages, ensure_ascii=False)}|4|<é>|True|False|\n|end"


def test_templates_that_refuse_or_are_broken(open_codec: Callable[..., TextCodec]) -> None:
    with pytest.raises(InputError, match=r"chat_template\.jinja: the chat template refuses these messages: no system here"):
        open_codec("byte-level", INST).render_chat([{"role": "system", "content": "x"}])
    with pytest.raises(BundleError, match="not a Jinja template"):
        open_codec("byte-level", "{% if %}").render_chat([])
    with pytest.raises(InputError, match="no chat template: pass plain text"):
        open_codec("byte-level").render_chat([])
    with pytest.raises(InputError, match="unsafe"):
        open_codec("byte-level", "{{ messages.__class__.__mro__ }}").render_chat([])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("template", "stop"), [(CHATML, "<|im_end|>"), (INST, "</s>")])
@pytest.mark.parametrize("question", ["And the dog?", "the marks <|im_end|></s> in a question", "answer0mark question0mark"])
def test_turns_by_ids_are_the_whole_conversation(
    open_codec: Callable[..., TextCodec], kind: str, template: str, stop: str, question: str
) -> None:
    codec = open_codec(kind, template, stops=(stop,))
    answer = {"role": "assistant", "content": "The fox"}
    messages = [{"role": "user", "content": "the fox"}, answer, {"role": "user", "content": question}]
    whole = codec.encode(codec.render_chat(messages), add_bos=False).tolist()
    first, later = codec.chat_turn("the fox", first=True).tolist(), codec.chat_turn(question, first=False).tolist()
    generated = whole[len(first) : len(whole) - len(later)]
    assert [*first, *generated, *later] == whole
    assert codec.decode(generated).strip() == "The fox"
    # An assistant that ended by itself, and whose stop token was fed: the next turn brings everything but that.
    end = id_of(codec._backend, stop)
    fed = codec.chat_turn(question, first=False, end_fed=True).tolist()
    assert fed == later[later.index(end) + 1 :]
    assert fed.count(end) == later.count(end) - 1


def test_a_first_turn_takes_a_system_message_and_a_later_one_refuses_it(open_codec: Callable[..., TextCodec]) -> None:
    codec = open_codec("byte-level", CHATML)
    text = codec.decode(codec.chat_turn("hi", first=True, system="Be kind."), skip_special=False)
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InputError, match="only the first turn"):
        codec.chat_turn("hi", first=False, system="Be kind.")


def test_without_an_end_of_turn_token_nothing_is_left_out(open_codec: Callable[..., TextCodec]) -> None:
    template = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}{{ 'assistant:' }}"
    codec = open_codec("byte-level", template)
    question = "what is <|im_end|> for?"
    plain, fed = (codec.chat_turn(question, first=False, end_fed=end_fed).tolist() for end_fed in (False, True))
    assert plain == fed
    assert codec.decode(fed, skip_special=False) == f"\nuser: {question}\nassistant:"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",
        "{% for message in messages %}{{ message.content | upper }}{% endfor %}",
        "{% for message in messages %}{{ message.content + message.content }}{% endfor %}",
    ],
)
def test_a_template_that_alters_earlier_messages_is_refused_for_later_turns(open_codec: Callable[..., TextCodec], template: str) -> None:
    codec = open_codec("byte-level", template)
    assert len(codec.chat_turn("hi", first=True))
    with pytest.raises(UnsupportedError, match="drops or alters earlier messages"):
        codec.chat_turn("hi", first=False)


@pytest.mark.real_weights
def test_smollm2_reads_and_writes_as_transformers_does(tmp_path: Path) -> None:
    from sinkring.models.fetch import KNOWN_WEIGHTS, fetch_weights
    from sinkring.models.tokenizer import read_tokenizer
    from transformers import AutoTokenizer

    weights = fetch_weights(KNOWN_WEIGHTS["smollm2"])
    oracle = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, local_files_only=True)
    data = read_tokenizer(weights)
    assert data is not None
    assert data.chat_template is not None
    (tmp_path / "tokenizer.json").write_text(data.json, encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(data.chat_template, encoding="utf-8")
    codec = TextCodec.open(tmp_path, Tokenizer("tokenizer.json", "chat_template.jinja", data.bos_id, data.stop_ids))

    text = " ".join(CORPUS)
    ids = codec.encode(text, add_bos=False)
    assert ids.tolist() == oracle.encode(text, add_special_tokens=False)
    assert "".join(increments(codec, ids)) == text

    messages = [{"role": "user", "content": "Hi 😀"}, {"role": "assistant", "content": "你好!"}, {"role": "user", "content": "  and\nnow?"}]
    whole = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert codec.render_chat(messages) == whole
    turns = [
        codec.chat_turn(messages[0]["content"], first=True),
        codec.encode(messages[1]["content"], add_bos=False),
        codec.chat_turn(messages[2]["content"], first=False),
    ]
    assert [int(id) for turn in turns for id in turn] == oracle.encode(whole, add_special_tokens=False)
