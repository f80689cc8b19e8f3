"""Text on either side of a stream: encode, decode token by token, stop at a string, and a chat's turns as ids.

Nothing here grows with a stream: the decoder looks at a window of at most 16 ids, the stop matcher holds back less than its longest stop,
and a chat goes on with the ids of its next turn alone, so old text is never rendered into ids a second time.

`tokenizers` and `jinja2` are imported when a bundle's text is opened and when its chat template is first used.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import BundleError, DependencyError, InputError, UnsupportedError
from sinkring.runtime.manifest import Tokenizer

if TYPE_CHECKING:
    import jinja2
    import tokenizers

_REPLACEMENT = "\ufffd"
# A character of UTF-8 is at most 4 tokens of one byte, so a window that is open for 8 holds bytes that are no text.
_OPEN_TOKENS = 8
_CHARACTER_TOKENS = 4


class TextCodec:
    """A bundle's tokenizer and chat template."""

    def __init__(self, backend: "tokenizers.Tokenizer", info: Tokenizer, chat_template: str | None) -> None:
        self.info = info
        self._backend = backend
        self._chat_template = chat_template
        self._compiled: jinja2.Template | None = None
        # A file may carry the truncation of its training run, which would cut long prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        self._special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def open(cls, bundle_path: Path, tokenizer: Tokenizer | None) -> "TextCodec":
        """Open what `tokenizer` (`Manifest.tokenizer`) names, relative to the bundle.

        Raises InputError for a bundle without a tokenizer, BundleError for a missing or damaged file, DependencyError without `tokenizers`.
        """
        if tokenizer is None:
            raise InputError(
                f"{bundle_path}: has no tokenizer, so it takes no text; feed token ids from Python, or export a source that has one"
            )
        try:
            import tokenizers
        except ImportError:
            raise DependencyError('text needs the package tokenizers: pip install "tokenizers>=0.21", or pass token ids') from None
        path = Path(bundle_path) / tokenizer.tokenizer
        text = _read(path)
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare Exception
            raise BundleError(f"{path}: not a tokenizer file ({error}); the bundle is damaged, export again") from None
        template = None if tokenizer.chat_template is None else _read(Path(bundle_path) / tokenizer.chat_template)
        return cls(backend, tokenizer, template)

    def encode(self, text: str, add_bos: bool) -> NDArray[np.int64]:
        """Ids int64 [T] of a text; "" gives T=0 or the BOS alone. Special tokens written in the text become their ids.

        add_bos puts the model's BOS in front, unless the text begins with it or the model has none. Raises InputError for lone surrogates.
        """
        ids = self._encoding(text).ids
        bos = self.info.bos_id
        if add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return np.array(ids, dtype=np.int64)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing. Raises InputError for negative ids."""
        numbers = [int(id) for id in ids]
        if any(id < 0 for id in numbers):
            raise InputError(f"token id {min(numbers)} is negative: ids count from 0")
        text: str = self._backend.decode(numbers, skip_special_tokens=skip_special)
        return text

    def writes(self, id: int, skip_special: bool = True) -> bool:
        """Whether `decode` reads the id at all: it is in the vocabulary and not a special token to skip."""
        return not (skip_special and id in self._special_ids) and id >= 0 and self._backend.id_to_token(id) is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation by the bundle's template; messages are {"role": ..., "content": ...}.

        Any BOS is the template's own: encode the text with add_bos=False. Its `eos_token` is the first stop token.
        Raises InputError for a bundle without a template and for messages that the template refuses, BundleError for a template that cannot
        be read, DependencyError without jinja2.
        """
        template = self._template()
        bos = None if self.info.bos_id is None else self._backend.id_to_token(self.info.bos_id)
        end = self._backend.id_to_token(self.info.stop_ids[0]) if self.info.stop_ids else None
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=bos or "",
                eos_token=end or "",
                tools=None,
                documents=None,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise InputError(f"{self.info.chat_template}: the chat template refuses these messages: {error}") from None

    def chat_turn(self, user_text: str, first: bool, end_fed: bool = False, system: str | None = None) -> NDArray[np.int64]:
        """Ids int64 [T] of the next user turn, up to where the assistant begins: feed them and generate.

        first: the whole opening, with `system` or else the template's default. Later turns begin with what the template writes after an
        assistant's message, its end-of-turn token first, because a stream that stops at a stop token has usually not fed it.
        end_fed: the stop token that the assistant ended with *was* fed; it is then left out here, so that the stream holds it once. Leave
        it False for an answer that was cut short.

        Raises as `render_chat` does; InputError for `system` in a later turn; UnsupportedError for a template that alters messages, where
        the next turn cannot be told from the text.
        """
        if first:
            opening = [] if system is None else [{"role": "system", "content": system}]
            return self.encode(self.render_chat([*opening, {"role": "user", "content": user_text}]), add_bos=False)
        if system is not None:
            raise InputError("system is given for a later turn: only the first turn takes a system message; reset the stream to change it")
        answer, question = _mark("answer", user_text), _mark("question", user_text)
        earlier = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = self.render_chat([*earlier, {"role": "user", "content": user_text}])
        outline = self.render_chat([*earlier, {"role": "user", "content": question}])
        # What the template writes between the answer and the user's words; nothing after that can be the end of the answer.
        between, found, _ = outline.rpartition(answer)[2].partition(question)
        start = text.find(answer) + len(answer)
        if text.count(answer) != 1 or not found or not text.startswith(between, start):
            raise UnsupportedError(
                f"{self.info.chat_template}: the chat template drops or alters earlier messages, so a later turn cannot go on by ids; "
                "render the whole conversation with render_chat into a reset stream"
            )
        ids = self._ids_from(text, start)
        if end_fed:
            closing = self._ids_from(text[: start + len(between)], start)
            ends = [index for index, id in enumerate(closing) if id in self.info.stop_ids]
            ids = ids[ends[0] + 1 :] if ends else ids
        return np.array(ids, dtype=np.int64)

    def _ids_from(self, text: str, start: int) -> list[int]:
        """Ids of text[start:] as they stand in the whole text, where a sentencepiece model adds no first space to them."""
        encoding = self._encoding(text)
        if any(low < start < high for low, high in encoding.offsets):
            return self._encoding(text[start:]).ids
        return [id for id, (low, _) in zip(encoding.ids, encoding.offsets, strict=True) if low >= start]

    def _encoding(self, text: str) -> "tokenizers.Encoding":
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError(f"text cannot be encoded as UTF-8 ({error}): remove lone surrogates") from None

    def _template(self) -> "jinja2.Template":
        if self._compiled is not None:
            return self._compiled
        if self._chat_template is None:
            raise InputError("the bundle has no chat template: pass plain text, or export again from a source that has one")
        try:
            import jinja2
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise DependencyError('chat needs the package jinja2: pip install "jinja2>=3.1.6", or pass plain text') from None
        found = version("jinja2")
        if tuple(map(int, found.split(".")[:3])) < (3, 1, 6):
            raise DependencyError(f'jinja2 is {found}, whose sandbox a template can leave: pip install "jinja2>=3.1.6"')

        class Generation(Extension):
            """`{% generation %}` marks the assistant's words for training; here its body is plain template."""

            tags = {"generation"}  # noqa: RUF012 jinja2 declares it as an instance variable

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        # The template is someone else's program: sandboxed, and with the functions that Hugging Face templates count on.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._compiled = environment.from_string(self._chat_template)
        except jinja2.TemplateError as error:
            raise BundleError(f"{self.info.chat_template}: not a Jinja template ({error}); export again") from None
        return self._compiled


class IncrementalDecoder:
    """Text of a stream of ids, as soon as it is certain: what the pushes and the flush return adds up to `TextCodec.decode` of all ids.

    A character whose bytes are not all there is held back. Each push decodes a window: the tokens of the last text that came out, which
    give the new ones the context for their spaces, and those since. Bytes that are no UTF-8 come out as U+FFFD; only in a byte-fallback
    model, where the whole run of byte tokens around them would decode differently, does their number differ from `decode`.
    """

    def __init__(self, codec: TextCodec, skip_special: bool = True) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._clear()

    def _clear(self) -> None:
        self._window: list[int] = []
        self._context_tokens = 0
        self._shown_characters = 0

    def push(self, id: int) -> str:
        """The text that this id completes, often "". Raises InputError for a negative id."""
        if not self._codec.writes(id, self._skip_special):
            return self._codec.decode([id], self._skip_special)
        self._window.append(id)
        text = self._text()
        settled = len(text.rstrip(_REPLACEMENT))
        new = text[self._shown_characters : settled]
        if settled == len(text) and new:
            self._window = self._window[self._context_tokens :]
            self._context_tokens = len(self._window)
            self._shown_characters = len(self._text())
        elif len(self._window) - self._context_tokens > _OPEN_TOKENS:
            # No text in sight. All but the last U+FFFD is certain, and the last tokens alone decide what becomes of that one.
            new = text[self._shown_characters : max(settled, len(text) - 1)]
            self._window = self._window[-_CHARACTER_TOKENS:]
            self._context_tokens = 0
            tail = self._text()
            self._shown_characters = len(tail) - tail.endswith(_REPLACEMENT)
        else:
            self._shown_characters += len(new)
        return new

    def flush(self) -> str:
        """What is still held back, at the end of a text; the decoder then begins a new one."""
        rest = self._text()[self._shown_characters :]
        self._clear()
        return rest

    def _text(self) -> str:
        return self._codec.decode(self._window, self._skip_special)


class StopMatcher:
    """Passes text on up to the first stop string, however the text is cut into pieces.

    The first stop is the one that ends first; of those that end together, the longest. Text that may be the beginning of a stop is held
    back: fewer characters than the longest stop has. Raises InputError for an empty stop.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if "" in self._stops:
            raise InputError('stop string "" is empty and would end every text at once: leave it out')
        self._longest = max(map(len, self._stops), default=1)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is certain not to be part of a stop; after a match, `matched` names the stop and every push returns ""."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            out, self._held = self._held[:at], ""
            return out
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                break
        else:
            length = 0
        cut = len(self._held) - length
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What is still held back, at the end of a text without a stop."""
        rest, self._held = self._held, ""
        return rest


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); the bundle is damaged, export again") from None


def _mark(name: str, text: str) -> str:
    """A word that does not occur in the text."""
    number = 0
    while f"{name}{number}mark" in text:
        number += 1
    return f"{name}{number}mark"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """jinja2's own filter escapes HTML, which a prompt must not."""
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
