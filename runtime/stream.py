"""One stream: a row of a decoder with its own position, history and sampler."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sinkring.runtime.device_sampling import candidates, sampling_inputs
from sinkring.runtime.embedding import Rows
from sinkring.runtime.errors import CapacityError, InputError, NumericalError
from sinkring.runtime.metrics import Recorder, counts_refusals, numerical_fault
from sinkring.runtime.sampling import Sampler, SamplingOptions, sampling_options
from sinkring.runtime.snapshot import LOGITS, write_snapshot
from sinkring.runtime.token_ids import NO_TOKEN, Ids, check_count, check_ids, check_stop_ids

if TYPE_CHECKING:
    from sinkring.runtime.decoder import Decoder

# What is left of the history after the furthest rollback: enough for any repetition window that makes sense.
HISTORY_TOKENS = 1024


class Stream:
    """Made by `Decoder.stream()`. Close it, or use it as a context manager, to give its row back.

    A token that `generate` has yielded belongs to the stream at once and counts in `position`; it is written to the cache with the next
    call, so that it reaches the user a step earlier and a following `feed` takes it along in its first chunk.
    """

    def __init__(self, decoder: "Decoder", row: int) -> None:
        self._decoder = decoder
        self.row = row
        self._fed = 0
        # One past the newest position that may have been written since the last reset: what it overwrote is gone, whatever is rolled back.
        self._reached = 0
        self._pending: list[int] = []
        self._history: deque[int] = deque(maxlen=HISTORY_TOKENS + decoder.shortest_capacity)
        self._sampler: Sampler | None = None
        self._logits = np.zeros(decoder.manifest.model.vocab_size, np.float32)
        # False after a rollback, or between two chunks of a call: the logits are those of another token than the last.
        self._logits_stand = True
        self._open = True
        # Why the stream is stopped, None while it is sound.
        self._alarm: str | None = None

    def __repr__(self) -> str:
        return f"Stream(row={self.row}, position={self.position}{'' if self._open else ', closed'})"

    @property
    def position(self) -> int:
        """Tokens in the stream so far: the position that the next token will have."""
        return self._fed + len(self._pending)

    @property
    def alarm(self) -> str | None:
        """Why the stream is stopped, its logits not finite or exploded; None while it is sound. Until `reset` it gives nothing more."""
        return self._alarm

    @property
    def recorder(self) -> Recorder:
        return self._decoder.recorder

    @counts_refusals
    def feed(self, ids: Ids, all_logits: bool = False) -> NDArray[np.float32]:
        """Append tokens. Exact for any number of them, from any position, also past the end of the ring.

        Returns float32 [V], the logits after the last token, or with all_logits float32 [len(ids), V].
        Raises InputError for no ids or an id outside [0, V), CapacityError past the position limit or, in a linear cache, the capacity;
        then nothing has changed; NumericalError, which stops the stream, for logits that are not finite or have exploded, of those that are
        computed: without all_logits the last token's, and none of the chunks before its own.
        """
        return self._feed(check_ids(ids, len(self._logits), "feed"), all_logits)

    @counts_refusals
    def feed_embeddings(self, rows: ArrayLike, all_logits: bool = False) -> NDArray[np.float32]:
        """Append embedded rows, float32 [T,hidden], in a bundle that was exported with inputs="embeddings"; returns what `feed` does.

        A row stands for one token: `Decoder.embed`'s, plus what an encoder adds, or an encoder's alone. The repetition penalty passes it
        over, and once a rollback or an interrupted call has left it as the last, something must be fed before a token can be sampled.
        Raises InputError for another dtype or shape and a row that is not finite, in a bundle that takes token ids for any; else as `feed`.
        """
        return self._feed(self._decoder.check_rows(rows, "feed_embeddings"), all_logits)

    @counts_refusals
    def generate(
        self,
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Yield up to max_tokens sampled tokens; see SamplingOptions for the options.

        Ends at a token of stop_ids (default: those of the bundle; `()` for never). That token is not yielded but does become part of the
        stream, so that a next turn continues after it. Calls with equal options go on with one random sequence, other options start a new
        one.

        Raises InputError before the first token if nothing has been fed or an option is out of range; from the loop, NumericalError for
        logits that are not finite or have exploded, InputError for a loop that a reset or a call with other options has ended,
        CapacityError past the position limit or the capacity or once the stream is closed. A token is then neither yielded nor made part
        of the stream.
        """
        options = SamplingOptions(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
        )
        most = check_count(max_tokens, "max_tokens")
        stops = frozenset(self._decoder.manifest.stop_ids) if stop_ids is None else check_stop_ids(stop_ids, len(self._logits))
        self._require_sound()
        self._require_logits("generate")
        return self._generate(most, self._sampler_for(options), stops)

    @counts_refusals
    def extend(self, tokens: int, temperature: float = 0.0, top_k: int = 0, seed: int = 0) -> NDArray[np.int64]:
        """Append `tokens` tokens; int64 [tokens], what `generate` yields with these options and stop_ids=(). Raises as that does.

        Where the engine was built with next_token, or to sample from top_k or more, the device runs many steps on end: no token is looked
        at before the last is there, and logits come to the host once, the last token's. It draws in float32, so that a draw within some
        1e-7 of the border between two tokens may fall to the other one.
        """
        options = SamplingOptions(temperature=temperature, top_k=top_k, seed=seed)
        check_count(tokens, "extend: tokens")
        self._require_sound()
        self._require_logits("extend")
        self._decoder.check_room(self.position, int(tokens))
        sampler = self._sampler_for(options)
        if tokens < 2 or candidates(options, len(self._logits)) > self._decoder.backend.most_top_k:
            return np.fromiter(self._generate(int(tokens), sampler, frozenset()), np.int64, int(tokens))
        first = self._pick(sampler)
        self.about_to_write(int(tokens) - 1)
        picked = self._decoder.extend(self, first, sampling_inputs(options, sampler.draws(int(tokens) - 1)))
        self._take_logits(self._decoder.backend.logits[self.row, -1:])
        self._count(len(picked))
        fed = [first, *picked.tolist()]
        for token in fed[:-1]:
            self._remember(token)
        self._require_sound()
        self._pending.append(fed[-1])
        self._remember(fed[-1])
        return np.array(fed, np.int64)

    @counts_refusals
    def sample(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> int:
        """A next token, not yet part of the stream: hand it to `feed`, or with those of other streams to `Decoder.step`.

        Options and errors as those of `generate`; its random sequence is the stream's own, whatever its neighbours do.
        """
        options = sampling_options(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
        )
        self._require_sound()
        self._require_logits("sample")
        return self._pick(self._sampler_for(options))

    @counts_refusals
    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` tokens, as if they had never been fed; they may have been fed, stepped or generated.

        Sampling goes on with the random sequence where it is. Raises CapacityError, naming the limit, for more than the ring still
        remembers: its slack, counted from the furthest position that was ever written; nothing has changed then. A linear cache
        remembers everything.
        """
        self._require_sound()
        check_count(tokens, "rollback: tokens")
        if not tokens:
            return
        limit = max(self.position - self._oldest(), 0)
        if tokens > limit:
            way = "that is the whole stream, use reset" if limit == self.position else self._slack_wanted(self.position - int(tokens))
            raise CapacityError(f"rollback: {tokens} tokens from position {self.position}, no more than {limit} can be taken back: {way}")
        for _ in range(min(int(tokens), len(self._history))):
            self._history.pop()
        written = max(int(tokens) - len(self._pending), 0)
        del self._pending[max(len(self._pending) - int(tokens), 0) :]
        if written:
            self._fed -= written
            self._logits_stand = False
        if self._sampler is not None:
            self._sampler.forget(self._known_tokens())

    def fork(self) -> "Stream":
        """A second stream, on a free row, that goes on from here bit for bit. Raises CapacityError when all rows are taken."""
        self._require_sound()
        return self._decoder.fork(self)

    def snapshot(self, path: str | Path) -> None:
        """Write the stream to `path`, for `Decoder.restore`; the file is there whole or not at all. Needs the package safetensors.

        Raises InputError when it can't be written, NumericalError for a stream that is stopped.
        """
        self._require_sound()
        write_snapshot(Path(path), self._decoder.manifest, *self.capture())

    def reset(self) -> None:
        """Forget everything: the stream equals a fresh one."""
        self._require_open()
        self._decoder.backend.reset_row(self.row)
        self.recorder.resets += 1
        self._fed = self._reached = 0
        self._logits_stand = True
        self._pending.clear()
        self._history.clear()
        self._sampler = self._alarm = None
        self._logits[:] = 0

    def close(self) -> None:
        """Give the row back. Closing twice does nothing."""
        if self._open:
            self._open = False
            self._decoder.release(self.row)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(self, max_tokens: int, sampler: Sampler, stops: frozenset[int]) -> Iterator[int]:
        for _ in range(max_tokens):
            token = self._draw(sampler)
            if token in stops:
                return
            yield token

    @counts_refusals
    def _draw(self, sampler: Sampler) -> int:
        self._require_sound()
        if sampler is not self._sampler:
            raise InputError("generate: this loop ended when the stream was reset or generate was called with other options; call it again")
        self._require_logits("generate")
        self._decoder.check_room(self.position, 1)
        token = self._pick(sampler)
        self._pending.append(token)
        self._remember(token)
        return token

    def _pick(self, sampler: Sampler) -> int:
        self._renew_logits()
        return sampler.sample(self._logits, checked=self._decoder.alarms)

    def _sampler_for(self, options: SamplingOptions) -> Sampler:
        if self._sampler is None or self._sampler.options != options:
            self._sampler = Sampler(options, len(self._logits))
            self._sampler.forget(self._known_tokens())
        return self._sampler

    def flush(self) -> None:
        """Write the tokens that were generated but not yet fed. `feed`, `generate` and `Decoder.step` do it by themselves."""
        if self._pending:
            self._advance(np.array(self._pending, np.int64), None)

    def check_next(self, token: int | Rows) -> int | Rows:
        """Could this be the next token, or the row float32 [hidden] of one? Called by `Decoder.step`. Raises as the feeding calls do."""
        checked = self._decoder.checked_next(token)
        self._require_sound()
        self._decoder.check_room(self.position, 1)
        return checked

    def about_to_write(self, tokens: int) -> None:
        """Called before the backend writes: should it be interrupted, what these tokens overwrite must count as gone."""
        self._reached = max(self._reached, self._fed + tokens)

    def took(self, token: int | Rows, logits: NDArray[np.float32]) -> None:
        """Called by `Decoder.step`: the row has been stepped by `token`."""
        self._take_logits(logits[None])
        self._count(1)
        self._remember(token if isinstance(token, int) else NO_TOKEN)

    def capture(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Everything the stream is: a record of JSON values, and arrays that alias nothing."""
        sampler = self._sampler
        record = {
            "fed": self._fed,
            "reached": self._reached,
            "pending": list(self._pending),
            "history": list(self._history),
            "logits_stand": self._logits_stand,
            "sampler": None if sampler is None else {"options": dataclasses.asdict(sampler.options), "state": sampler.state()},
        }
        return record, {**self._decoder.backend.read_row(self.row), LOGITS: self._logits.copy()}

    def install(self, record: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> None:
        """Become what `capture` gave. The record is trusted: `read_snapshot` has checked it."""
        self._fed, self._reached = record["fed"], record["reached"]
        self._pending = list(record["pending"])
        self._history = deque(record["history"], maxlen=self._history.maxlen)
        self._logits_stand = record["logits_stand"]
        self._sampler = None
        if record["sampler"] is not None:
            self._sampler = Sampler(SamplingOptions(**record["sampler"]["options"]), len(self._logits))
            self._sampler.load_state(record["sampler"]["state"])
        self._alarm = None
        self._logits[:] = tensors[LOGITS]
        if self._logits_stand:
            self._take_logits(self._logits[None])
        self._decoder.backend.write_row(self.row, tensors)

    def _feed(self, fed: NDArray[np.int64] | Rows, all_logits: bool) -> NDArray[np.float32]:
        self._require_sound()
        carried = len(self._pending)
        whole = self._decoder.joined(np.array(self._pending, np.int64), fed) if carried else fed
        self._decoder.check_room(self._fed, len(whole))
        out = np.empty((len(whole), len(self._logits)), np.float32) if all_logits else None
        self._advance(whole, out)
        return self._logits.copy() if out is None else out[carried:]

    def _advance(self, fed: NDArray[np.int64] | Rows, out: NDArray[np.float32] | None) -> None:
        """Run tokens, or the rows of tokens, of which the first `len(_pending)` are the pending ones."""
        tokens = fed if fed.ndim == 1 else np.full(len(fed), NO_TOKEN)
        chunk = self._decoder.manifest.chunk
        self.about_to_write(min(chunk, len(tokens)))
        for start, stop, logits in self._decoder.run(self.row, self._fed, fed, out is not None):
            if out is not None:
                out[start:stop] = logits
            self._take_logits(logits)
            # All kept in step with the cache chunk by chunk, so that an interrupt between two chunks leaves a stream that can go on.
            self._count(stop - start, logits_stand=len(logits) > 0)
            carried = min(len(self._pending), stop - start)
            del self._pending[:carried]
            for token in tokens[start + carried : stop].tolist():
                self._remember(token)
            self._require_sound()
            self.about_to_write(min(chunk, len(tokens) - stop))

    def _count(self, tokens: int, logits_stand: bool = True) -> None:
        self.recorder.wraps += self._decoder.wraps_within(self._fed + tokens) - self._decoder.wraps_within(self._fed)
        self._fed, self._logits_stand = self._fed + tokens, logits_stand

    def _oldest(self) -> int:
        """The furthest position to roll back to: one token before it, the last one's logits can still be made anew."""
        # Up to the first wrap nothing has been overwritten.
        wrapped = self._reached > self._decoder.shortest_capacity
        return self._reached - self._decoder.slack_tokens if wrapped else 0

    def _slack_wanted(self, target: int) -> str:
        return f"what lay before is overwritten; export with --slack {self._reached - target} to take back that many"

    def _renew_logits(self) -> None:
        """Make `_logits` those of the newest token: write what is pending, or run the last token again where they are not its own."""
        self.flush()
        if not self._logits_stand:
            last = np.array([self._history[-1]], np.int64)
            for _, _, logits in self._decoder.run(self.row, self._fed - 1, last, False):
                self._take_logits(logits)
            self._require_sound()
            self._logits_stand = True

    def _require_logits(self, call: str) -> None:
        if not self.position:
            raise InputError(f"{call}: the stream is empty, there is nothing to continue; feed a prompt of at least one token first")
        if not self._logits_stand and self._fed < self._oldest():
            raise InputError(f"{call}: an interrupted call may have overwritten what the last token saw; feed a token first")
        if not self._logits_stand and NO_TOKEN in [*self._history][-1:]:
            way = "feed something first, or roll it back and feed it again"
            raise InputError(f"{call}: after a rollback or an interrupted call, the last token is a row, which was not kept: {way}")

    def _remember(self, token: int) -> None:
        self._history.append(token)
        if self._sampler is not None and token != NO_TOKEN:
            self._sampler.observe(token)

    def _known_tokens(self) -> list[int]:
        """The history without what was fed as embeddings."""
        return [token for token in self._history if token != NO_TOKEN]

    def _take_logits(self, logits: NDArray[np.float32]) -> None:
        """Logits [N,V] that were computed, N may be 0: keep the last, and stop the stream if any are no numbers to go on with."""
        if not len(logits):
            return
        if self._decoder.alarms and (fault := numerical_fault(logits)) is not None:
            self._alarm = fault
            self.recorder.numerical_alarms += 1
        self._logits[:] = logits[-1]

    def _require_sound(self) -> None:
        self._require_open()
        if self._alarm is not None:
            raise NumericalError(
                f"the logits at position {self._fed} {self._alarm}: the stream is stopped, nothing of it was given out; reset the stream, "
                "and if it comes back export with dtype fp32"
            )

    def _require_open(self) -> None:
        self._decoder.require_open()
        if not self._open:
            raise CapacityError("the stream is closed; take a new one with decoder.stream()")
