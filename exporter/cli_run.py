"""`sinkring run`: text from a prompt, or a chat that goes on by ids for as long as it likes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sinkring.exporter.cli_faults import INTERRUPTED
from sinkring.exporter.cli_live import LiveLine, has_terminal
from sinkring.exporter.cli_output import note, print_json
from sinkring.exporter.cli_ring import ring_line
from sinkring.exporter.machine import describe_machine
from sinkring.runtime import Decoder, Manifest, SamplingOptions, Stream, open_bundle
from sinkring.runtime.answer import Answer
from sinkring.runtime.bundle import check_consistent
from sinkring.runtime.errors import InputError
from sinkring.runtime.metering import Meter
from sinkring.runtime.prometheus import serve_metrics
from sinkring.runtime.prompt import encode_prompt
from sinkring.runtime.stream import Ids
from sinkring.runtime.text import StopMatcher, TextCodec

# Prompts are fed in pieces of so many chunks, so that the live line moves and Ctrl-C is heard.
_CHUNKS_PER_PIECE = 8


@dataclass(frozen=True)
class RunOptions:
    """tokens: the longest answer. threads: None for all cores. as_json: no text as it comes, but an object for each turn of a chat as it
    ends, and one at the end. watch: draw the ring at the foot of the terminal.
    metrics_port: serve the decoder's metrics there; 0 for any that is free, None for not. device: None for the backend's own."""

    tokens: int
    sampling: SamplingOptions
    stops: tuple[str, ...]
    backend: str
    threads: int | None
    as_json: bool
    watch: bool = False
    metrics_port: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InputError(f"tokens={self.tokens}: must be 0 or more")
        if self.watch and not has_terminal():
            raise InputError("--watch draws on a terminal, and stderr is none here; leave it out")
        StopMatcher(self.stops)
        for stop in self.stops:
            _check_text("--stop", stop)

    def for_backend(self) -> dict[str, Any]:
        """Options of the backend, as far as they were given."""
        given = {"threads": self.threads, "device": self.device}
        return {name: value for name, value in given.items() if value is not None}


def run_prompt(bundle: Path, prompt: str | None, options: RunOptions) -> None:
    """Continue `prompt`, or what stdin says if None."""
    if prompt is not None:
        _check_text("--prompt", prompt)
    with _open(bundle, options) as session:
        text = _stdin_text() if prompt is None else prompt
        session.ask(encode_prompt(bundle, session.codec, text))


def run_chat(bundle: Path, options: RunOptions) -> None:
    """Answer stdin's lines, each one turn, until it ends. Empty lines are passed over."""
    with _open(bundle, options, chat=True) as session:
        end_fed = False
        for number, line in enumerate(_lines()):
            ids = session.codec.chat_turn(line, first=not number, end_fed=end_fed)
            end_fed = session.ask(ids, user=line)


class _Session:
    """One stream and what is said about it on stderr."""

    def __init__(self, codec: TextCodec, decoder: Decoder, stream: Stream, live: LiveLine, options: RunOptions, chat: bool) -> None:
        self.codec = codec
        self.meter = Meter()
        self.decoder, self.stream = decoder, stream
        self._live, self._options, self._chat = live, options, chat
        # Of the latest turn alone: a chat has no end. `_turns` counts those before it.
        self._turn: dict[str, Any] | None = None
        self._turns = 0

    def ask(self, ids: Ids, user: str | None = None) -> bool:
        """Feed ids and write the answer. Whether it ended with a stop token, which is then in the stream."""
        piece = self.decoder.manifest.chunk * _CHUNKS_PER_PIECE
        for start in range(0, len(ids), piece):
            self._live.show(self.line)
            self.meter.feed(self.stream, ids[start : start + piece])
        options = self._options
        answer = Answer(self.stream, self.codec, options.tokens, options.sampling, options.stops, self.meter)
        turn: dict[str, Any] = {} if user is None else {"user": user}
        turn |= {"prompt_tokens": len(ids), "text": "", "generated_tokens": 0, "ended_by": "interrupt"}
        self._turn = turn
        for text in answer:
            turn["generated_tokens"] = answer.tokens
            if options.as_json:
                turn["text"] += text
            elif text:
                sys.stdout.write(text)
                sys.stdout.flush()
            self._live.show(self.line)
        turn["ended_by"] = answer.ended_by
        if not options.as_json:
            print(flush=True)
        elif self._chat:
            self._end_turn()
        return answer.ended_by == "stop_token"

    def _end_turn(self) -> None:
        if self._turn is not None:
            print_json(self._turn)
            sys.stdout.flush()
            self._turn = None
            self._turns += 1

    def line(self) -> str:
        if self._options.watch:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            return ring_line(self.decoder.manifest.rings[0].geometry, self.stream.position, columns)
        rate = self.meter.tokens_per_second
        speed = "reading" if rate is None else f"{rate:.1f} tokens/s"
        return f"position {self.stream.position:,}   {speed}   cache {self.decoder.cache_bytes:,} bytes"

    def finish(self, interrupted: bool) -> None:
        """The summary: a line on stderr, or the JSON object."""
        rate, fed_rate = self.meter.tokens_per_second, self.meter.fed_tokens_per_second
        machine, name = describe_machine(), self._options.backend
        library = getattr(sys.modules.get(name.replace("-", "_")), "__version__", "")
        device = self.decoder.backend.device
        where = f"{name} {library} on {f'{machine.cpu}, {machine.cores} cores' if device == 'cpu' else device}"
        if self._options.as_json:
            totals = {
                "position": self.stream.position,
                "fed_tokens": self.meter.fed_tokens,
                "fed_tokens_per_second": fed_rate,
                "generated_tokens": self.meter.generated_tokens,
                "tokens_per_second": rate,
                "cache_bytes": self.decoder.cache_bytes,
                "interrupted": interrupted,
                "measured_on": where,
            }
            if self._chat:
                self._end_turn()
                print_json({"turns": self._turns, **totals})
            else:
                print_json({**(self._turn or {}), **totals})
            return
        if self._options.watch:
            # The line itself is gone by now, and a quick run ends before it was ever drawn again.
            note(self.line())
        speed = f"{rate:.1f} tokens/s" if rate is not None else "too few to measure"
        note(
            f"position {self.stream.position:,}; generated {self.meter.generated_tokens:,} ({speed}), read {self.meter.fed_tokens:,}"
            f"{f' ({fed_rate:.0f} tokens/s)' if fed_rate else ''}; cache {self.decoder.cache_bytes:,} bytes; {where}"
        )


@contextmanager
def _open(bundle: Path, options: RunOptions, chat: bool = False) -> Iterator[_Session]:
    """A session that says its summary at the end, also when Ctrl-C is that end; then the exit status says so."""
    manifest = Manifest.read(bundle)
    check_consistent(bundle, manifest)
    codec = TextCodec.open(bundle, manifest.tokenizer)
    with open_bundle(bundle, options.backend, **options.for_backend()) as decoder, decoder.stream() as stream:
        interrupted = False
        with _metrics(decoder, options.metrics_port), LiveLine() as live:
            session = _Session(codec, decoder, stream, live, options, chat)
            try:
                yield session
            except KeyboardInterrupt:
                interrupted = True
                if not options.as_json:
                    print(flush=True)
        session.finish(interrupted)
    if interrupted:
        raise SystemExit(INTERRUPTED)


@contextmanager
def _metrics(decoder: Decoder, port: int | None) -> Iterator[None]:
    if port is None:
        yield
        return
    found, close = serve_metrics(decoder, port)
    note(f"metrics at http://127.0.0.1:{found}/metrics")
    try:
        yield
    finally:
        close()


def _stdin_text() -> str:
    """All of stdin, without the newline at its end."""
    if sys.stdin.isatty():
        note("type the prompt; Ctrl-D ends it")
    return _decoded(_stdin_bytes().read()).removesuffix("\n").removesuffix("\r")


def _lines() -> Iterator[str]:
    """Lines of stdin that are not blank."""
    ask = sys.stdin.isatty()
    stdin = _stdin_bytes()
    while True:
        if ask:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = stdin.readline()
        if not line:
            return
        if text := _decoded(line).strip():
            yield text


def _stdin_bytes() -> BinaryIO:
    """Bytes, since the locale may name another encoding than the UTF-8 that a tokenizer wants."""
    return sys.stdin.buffer


def _check_text(option: str, text: str) -> None:
    """Python hands on bytes of the command line that are no text as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{option} is not UTF-8 text (character {error.start} is byte 0x{ord(text[error.start]) & 0xFF:02x}); convert it, with iconv "
            "for example"
        ) from None


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"stdin is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); convert it, with iconv for example"
        ) from None
