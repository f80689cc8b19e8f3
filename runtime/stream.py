"""One stream: a row of a decoder with its own position, history and sampler."""

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import CapacityError, InputError
from sinkring.runtime.sampling import Sampler, SamplingOptions

if TYPE_CHECKING:
    from sinkring.runtime.decoder import Decoder

# Enough for any repetition window that makes sense; bounded, because a stream is not.
HISTORY_TOKENS = 1024

Ids = Sequence[int] | NDArray[np.integer]


class Stream:
    """Made by `Decoder.stream()`. Close it, or use it as a context manager, to give its row back.

    A token that `generate` has yielded belongs to the stream at once and counts in `position`; it is written to the cache with the next
    call, so that it reaches the user a step earlier and a following `feed` takes it along in its first chunk.
    """

    def __init__(self, decoder: "Decoder", row: int) -> None:
        self._decoder = decoder
        self.row = row
        self._fed = 0
        self._pending: list[int] = []
        self._history: deque[int] = deque(maxlen=HISTORY_TOKENS)
        self._sampler: Sampler | None = None
        self._logits = np.zeros(decoder.manifest.model.vocab_size, np.float32)
        self._open = True

    @property
    def position(self) -> int:
        """Tokens in the stream so far: the position that the next token will have."""
        return self._fed + len(self._pending)

    def feed(self, ids: Ids, all_logits: bool = False) -> NDArray[np.float32]:
        """Append tokens. Exact for any number of them, from any position, also past the end of the ring.

        Returns float32 [V], the logits after the last token, or with all_logits float32 [len(ids), V].
        Raises InputError for no ids or an id outside [0, V), CapacityError past the position limit; then nothing has changed.
        """
        tokens = self._checked(ids)
        self._require_open()
        carried = len(self._pending)
        whole = np.concatenate([np.array(self._pending, np.int64), tokens]) if carried else tokens
        self._decoder.check_room(self._fed, len(whole))
        out = np.empty((len(whole), len(self._logits)), np.float32) if all_logits else None
        self._advance(whole, out)
        return self._logits.copy() if out is None else out[carried:]

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

        Raises InputError before the first token if nothing has been fed or an option is out of range; from the loop, InputError for logits
        that are not finite and for a loop that a reset or a call with other options has ended, CapacityError past the position limit or
        once the stream is closed. A token is then neither yielded nor made part of the stream.
        """
        options = SamplingOptions(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
        )
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int | np.integer) or max_tokens < 0:
            raise InputError(f"max_tokens={max_tokens!r}: must be a whole number, 0 or more")
        stops = self._checked_stops(stop_ids)
        self._require_open()
        if not self.position:
            raise InputError("generate: the stream is empty, there is nothing to continue; feed a prompt of at least one token first")
        return self._generate(int(max_tokens), self._sampler_for(options), stops)

    def reset(self) -> None:
        """Forget everything: the stream equals a fresh one."""
        self._require_open()
        self._decoder.backend.reset_row(self.row)
        self._fed = 0
        self._pending.clear()
        self._history.clear()
        self._sampler = None
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
            self._require_open()
            if sampler is not self._sampler:
                raise InputError(
                    "generate: this loop ended when the stream was reset or generate was called with other options; call it again"
                )
            self._decoder.check_room(self.position, 1)
            self._flush()
            token = sampler.sample(self._logits)
            self._pending.append(token)
            self._remember(token)
            if token in stops:
                return
            yield token

    def _sampler_for(self, options: SamplingOptions) -> Sampler:
        if self._sampler is None or self._sampler.options != options:
            self._sampler = Sampler(options, len(self._logits))
            for token in self._history:
                self._sampler.observe(token)
        return self._sampler

    def _flush(self) -> None:
        """Write the tokens that were sampled but not yet fed."""
        if self._pending:
            self._advance(np.array(self._pending, np.int64), None)

    def _advance(self, tokens: NDArray[np.int64], out: NDArray[np.float32] | None) -> None:
        """Run the tokens, of which the first `len(_pending)` are the pending ones."""
        for start, stop, logits in self._decoder.run(self.row, self._fed, tokens, out is not None):
            if out is not None:
                out[start:stop] = logits
            self._logits[:] = logits[-1]
            # All kept in step with the cache chunk by chunk, so that an interrupt between two chunks leaves a stream that can go on.
            self._fed += stop - start
            carried = min(len(self._pending), stop - start)
            del self._pending[:carried]
            for token in tokens[start + carried : stop].tolist():
                self._remember(token)

    def _remember(self, token: int) -> None:
        self._history.append(token)
        if self._sampler is not None:
            self._sampler.observe(token)

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        try:
            array = np.asarray(ids)
        except (ValueError, TypeError) as error:  # rows of different lengths, or no numbers at all
            raise InputError(f"feed: got {type(ids).__name__} that is no list of ids ({error}); give token ids in one dimension") from None
        if array.ndim != 1 or not array.size:
            raise InputError(f"feed: got ids of shape {array.shape}, expected at least one token id in one dimension")
        # numpy keeps integers beyond 64 bits as objects: those are refused below, as outside the vocabulary.
        if not np.issubdtype(array.dtype, np.integer) and not all(type(token) is int for token in array.tolist()):
            raise InputError(f"feed: got ids of dtype {array.dtype}, expected integers")
        vocab = len(self._logits)
        wrong = np.flatnonzero((array < 0) | (array >= vocab))
        if wrong.size:
            raise InputError(
                f"feed: ids[{wrong[0]}] is {array[wrong[0]]}, outside the vocabulary [0, {vocab}): use this bundle's tokenizer"
            )
        return array.astype(np.int64)

    def _checked_stops(self, stop_ids: Iterable[int] | None) -> frozenset[int]:
        tokenizer = self._decoder.manifest.tokenizer
        if stop_ids is None:
            return frozenset(tokenizer.stop_ids if tokenizer else ())
        try:
            stops = frozenset(operator.index(token) for token in stop_ids)
        except TypeError:
            raise InputError(f"stop_ids={stop_ids!r}: must be a list of token ids, () to never stop") from None
        vocab = len(self._logits)
        if wrong := sorted(token for token in stops if not 0 <= token < vocab):
            raise InputError(f"stop_ids: {wrong[0]} is outside the vocabulary [0, {vocab}): was it made by this bundle's tokenizer?")
        return stops

    def _require_open(self) -> None:
        self._decoder.require_open()
        if not self._open:
            raise CapacityError("the stream is closed; take a new one with decoder.stream()")
