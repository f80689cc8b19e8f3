"""An opened bundle: rows for streams, and the calls that advance them."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sinkring.runtime.backends import Backend, open_backend
from sinkring.runtime.bundle import check_consistent, check_files
from sinkring.runtime.device_sampling import DRAW, GREEDY
from sinkring.runtime.embedding import EmbeddingTable, Rows, check_rows
from sinkring.runtime.errors import CapacityError, InputError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.metrics import Metrics, Recorder, counts_refusals
from sinkring.runtime.ring import split_chunks
from sinkring.runtime.snapshot import read_snapshot
from sinkring.runtime.stream import Stream
from sinkring.runtime.token_ids import Ids, check_ids


def open_bundle(
    bundle: str | Path,
    backend: str = "onnxruntime",
    *,
    target: str | None = None,
    verify: bool = True,
    alarms: bool = True,
    **options: Any,
) -> "Decoder":
    """Open a bundle folder; everything that running it needs is allocated now.

    target: which graphs to run, by what they were lowered for; default: the backend's own. verify=False skips the sha256 of the weights.
    alarms=False gives out logits as they are, also such as are not finite or have exploded: for tools that measure them.
    options go to the backend (onnxruntime: threads).
    Raises BundleError, InputError for an option out of range, UnsupportedError, DependencyError.
    """
    path = Path(bundle)
    manifest = Manifest.read(path)
    check_consistent(path, manifest)
    check_files(path, manifest, hashes=verify)
    table = None if manifest.embedding is None else EmbeddingTable(path, manifest.embedding)
    return Decoder(path, manifest, open_backend(backend, path, manifest, target, options), alarms, table)


class Decoder:
    """Made by `open_bundle`. Use as a context manager, or call `close`. Not thread-safe: one thread at a time."""

    def __init__(
        self, path: Path, manifest: Manifest, backend: Backend, alarms: bool = True, embedding: EmbeddingTable | None = None
    ) -> None:
        self.path, self.manifest, self.backend, self.alarms = path, manifest, backend, alarms
        self._embedding = embedding
        self._geometries = tuple(ring.geometry for ring in manifest.rings)
        self._free = list(range(manifest.batch))
        self._streams: dict[int, Stream] = {}
        self._open = True
        self.recorder = Recorder()

    def metrics(self) -> Metrics:
        """What the decoder is doing, for a monitor. May be called from another thread."""
        recorder = self.recorder
        return Metrics(
            positions={row: stream.position for row, stream in list(self._streams.items())},
            tokens=recorder.tokens,
            tokens_per_second=recorder.rate(),
            step_p50_ms=recorder.step_percentile(50),
            step_p99_ms=recorder.step_percentile(99),
            cache_bytes=self.cache_bytes,
            wraps=recorder.wraps,
            resets=recorder.resets,
            refusals=recorder.refusals,
            numerical_alarms=recorder.numerical_alarms,
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of all state tensors: constant for the decoder's whole life."""
        return self.manifest.cache_bytes

    @property
    def slack_tokens(self) -> int:
        """How many tokens a stream can take back once a ring has overwritten one; all of them if its caches are linear."""
        return min(geometry.slack if geometry.wraps else geometry.window_tokens for geometry in self._geometries)

    def wraps_within(self, tokens: int) -> int:
        """How often the first ring has begun anew in a stream of `tokens` tokens."""
        return self._geometries[0].wraps_within(tokens)

    @property
    def shortest_capacity(self) -> int:
        """Tokens of a stream before any ring has overwritten one."""
        return min(geometry.capacity for geometry in self._geometries)

    @counts_refusals
    def stream(self) -> Stream:
        """A fresh stream on a free row. Raises CapacityError when all rows are taken."""
        self.require_open()
        if not self._free:
            raise CapacityError(f"all {self.manifest.batch} rows of the bundle have a stream; close one, or export with a larger --batch")
        self.backend.reset_row(self._free[0])
        row = self._free.pop(0)
        self._streams[row] = Stream(self, row)
        return self._streams[row]

    @counts_refusals
    def embed(self, ids: Ids, codes: ArrayLike | None = None) -> Rows:
        """What the model embeds tokens as: float32 [T,hidden] of ids [T], for `Stream.feed_embeddings` with an encoder's rows added.

        codes [T,K]: of a model with K audio codebooks, the code of each beside each token; by default silence in all. ids may be any row of
        the table: some models have start tokens that lie beyond the vocabulary of their logits.
        Raises InputError for what is outside the table, and for a bundle that takes token ids.
        """
        self.require_open()
        return self._table("embed").embed(ids, codes)

    def check_rows(self, rows: ArrayLike, call: str) -> Rows:
        """Called by a stream: rows as they can be run. Raises InputError."""
        return check_rows(rows, self._table(call).hidden_size, call)

    def checked_next(self, token: int | Rows) -> int | Rows:
        """Called by a stream: a token, or the row of one, as it can be run. Raises InputError."""
        # Of every step: numpy takes longer for one number than for a thousand.
        if type(token) is int and 0 <= token < self.manifest.model.vocab_size:
            return token
        if isinstance(token, np.ndarray) and token.ndim == 1:
            return self.check_rows(token[None], "step")[0]
        return int(check_ids([token], self.manifest.model.vocab_size, "step")[0])  # type: ignore[list-item]  # what is no token is refused

    def joined(self, pending: NDArray[np.int64], fed: NDArray[np.int64] | Rows) -> NDArray[np.int64] | Rows:
        """Called by a stream: tokens, and after them tokens or rows, as one."""
        return np.concatenate([pending if fed.ndim == 1 else self._table("feed").of_tokens(pending), fed])

    @counts_refusals
    def step(self, tokens: Mapping[Stream, int | Rows]) -> dict[Stream, NDArray[np.float32]]:
        """Append one token to each of the named streams, in one call of the decode graph; no other stream changes by a bit.

        In a bundle that takes embeddings a token may be a row, float32 [hidden], in its place.

        Returns float32 [V] for each: the logits after its token.
        Raises InputError or CapacityError, before anything has changed, for an id outside [0, V), a stream of another decoder or a closed
        one, and past the position limit or the capacity; NumericalError likewise for a stream that is stopped. A stream whose logits turn
        out not to be sound now is stopped, and does not keep the others from theirs: see `Stream.alarm`.
        """
        self.require_open()
        if not isinstance(tokens, Mapping) or not tokens:
            raise InputError(f"step: got {tokens!r}; give a dictionary of at least one stream and its token")
        ids = {}
        for stream, token in tokens.items():
            if not isinstance(stream, Stream):
                raise InputError(f"step: {stream!r} is {type(stream).__name__}; give a dictionary of streams and their tokens")
            if self._streams.get(stream.row) is not stream:
                raise InputError("step: a stream is closed or belongs to another decoder; use open streams of this one")
            ids[stream] = stream.check_next(token)
        for stream in ids:
            stream.flush()
        last = self.manifest.position_limit - 1
        for row, stream in self._streams.items():
            # What an idle row computes is dropped, but even so its position must be one that the graph has angles for.
            self._place(row, ids.get(stream, 0), min(stream.position, last))
        idle = [row for row, stream in self._streams.items() if stream not in ids]
        for stream in ids:
            stream.about_to_write(1)
        began = time.perf_counter()
        self.backend.decode(idle)
        self.recorder.call(began, len(ids), decode=True)
        for stream, token in ids.items():
            stream.took(token, self.backend.logits[stream.row, -1])
        return {stream: self.backend.logits[stream.row, -1].copy() for stream in ids}

    def extend(self, stream: Stream, first: int, sampling: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Called by `Stream.extend`: feed `first` and then the tokens that the backend picks to its row. The tokens picked, int64 [n].

        sampling: the inputs of device_sampling, int64 [n], one number a step.
        """
        steps = len(sampling[DRAW])
        last = self.manifest.position_limit - 1
        positions = np.empty((steps, self.manifest.batch), np.int64)
        for row in range(self.manifest.batch):
            other = self._streams.get(row)
            positions[:, row] = min(other.position, last) if other is not None else 0
        positions[:, stream.row] = np.arange(stream.position, stream.position + steps)
        inputs = {"position": positions}
        for ring in self.manifest.rings:
            slots = [ring.geometry.slot(position) for position in positions.ravel().tolist()]
            inputs[ring.write_index] = np.array(slots, np.int64).reshape(positions.shape)
        if self.backend.most_top_k > 1:
            for name, values in sampling.items():
                inputs[name] = np.full_like(positions, GREEDY[name])
                inputs[name][:, stream.row] = values
        self.backend.input[:] = 0
        self.backend.input[stream.row] = first
        began = time.perf_counter()
        picked = self.backend.extend(inputs, [row for row in self._streams if row != stream.row])
        # Not as a decode call, whose time is that of one step.
        self.recorder.call(began, steps, decode=False)
        return picked[:, stream.row]

    def restore(self, path: str | Path) -> Stream:
        """A stream that goes on bit for bit from `Stream.snapshot(path)`, on a free row, in this process or another.

        One that a decoder without alarms has saved with logits that are not finite comes back stopped: see `Stream.alarm`.

        Raises BundleError for a file that is damaged or of another bundle, CapacityError when all rows are taken; no live stream changes.
        """
        self.require_open()
        record, tensors = read_snapshot(Path(path), self.manifest)
        return self._take_over(record, tensors)

    def fork(self, stream: Stream) -> Stream:
        """Called by `Stream.fork`."""
        return self._take_over(*stream.capture())

    def _take_over(self, record: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> Stream:
        stream = self.stream()
        try:
            stream.install(record, tensors)
        except BaseException:
            stream.close()
            raise
        return stream

    def release(self, row: int) -> None:
        """Called by a stream that closes."""
        del self._streams[row]
        self._free.append(row)

    def check_room(self, position: int, tokens: int) -> None:
        """Raises CapacityError if a stream at `position` cannot take `tokens` more."""
        limit = self.manifest.position_limit
        if position + tokens > limit:
            raise CapacityError(
                f"position {position} + {tokens} tokens is past {limit}, the last position with exact angles; reset the stream"
            )
        for most in (geometry.most_tokens for geometry in self._geometries):
            if most is not None and position + tokens > most:
                raise CapacityError(
                    f"position {position} + {tokens} tokens is {position + tokens}, the bundle's capacity is {most}: "
                    "reset the stream, export with a larger --capacity, or with --policy streaming for streams without end"
                )

    def run(
        self, row: int, position: int, fed: NDArray[np.int64] | Rows, all_logits: bool
    ) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """Feed a row in chunks: tokens int64 [n], or rows float32 [n,hidden].

        Yields (start, stop, logits of the last N of these tokens [N,V]); the next call overwrites logits. With all_logits N is stop-start,
        else 1 in the last chunk, and in others 0, or 1 where computing none would save nothing.
        """
        start = 0
        for length in split_chunks(position, len(fed), self.manifest.chunk, self._geometries):
            stop = start + length
            at = position + start
            if length == 1 and self.manifest.batch == 1:
                logits = self._decode_one(fed[start], at)
            else:
                write_index = tuple(geometry.slot(at) for geometry in self._geometries)
                began = time.perf_counter()
                piece = fed[start:stop]
                if self._embedding is not None and piece.ndim == 1:
                    piece = self._embedding.of_tokens(piece.astype(np.int64, copy=False))
                logits = self.backend.prefill(row, piece, at, write_index, length if all_logits else int(stop == len(fed)))
                self.recorder.call(began, length, decode=False)
            yield start, stop, logits
            start = stop

    def close(self) -> None:
        """Release the backend. Streams of this decoder cannot be used afterwards. Closing twice does nothing."""
        if self._open:
            self._open = False
            self.backend.close()

    def require_open(self) -> None:
        """Raises CapacityError once the decoder is closed."""
        if not self._open:
            raise CapacityError(f"the decoder of {self.path} is closed; open the bundle again")

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode_one(self, token: int | Rows, position: int) -> NDArray[np.float32]:
        self._place(0, token, position)
        began = time.perf_counter()
        self.backend.decode()
        self.recorder.call(began, 1, decode=True)
        return self.backend.logits[0]

    def place_token(self, row: int, token: int | Rows) -> None:
        """Fill a row of the decode graph's input: with a token, embedded where the graph takes rows, or with a row."""
        if self._embedding is None or isinstance(token, np.ndarray):
            self.backend.input[row, 0] = token
        else:
            self._embedding.put_token(token, self.backend.input[row, 0])

    def _table(self, call: str) -> EmbeddingTable:
        if self._embedding is None:
            raise InputError(f"{call}: the graphs of {self.path} take token ids, give it those; or export with --inputs embeddings")
        return self._embedding

    def _place(self, row: int, token: int | Rows, position: int) -> None:
        """Fill a row of the decode graph's inputs."""
        backend = self.backend
        self.place_token(row, token)
        backend.position[row] = position
        for buffer, geometry in zip(backend.write_index, self._geometries, strict=True):
            buffer[row] = geometry.slot(position)
