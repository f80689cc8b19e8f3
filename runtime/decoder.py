"""An opened bundle: rows for streams, and the calls that advance them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.backends import Backend, open_backend
from sinkring.runtime.bundle import check_consistent, check_files
from sinkring.runtime.errors import CapacityError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.ring import split_chunks
from sinkring.runtime.stream import Stream


def open_bundle(
    bundle: str | Path, backend: str = "onnxruntime", *, target: str | None = None, verify: bool = True, **options: Any
) -> "Decoder":
    """Open a bundle folder; everything that running it needs is allocated now.

    target: which graphs to run, by what they were lowered for; default: the backend's own. verify=False skips the sha256 of the weights.
    options go to the backend (onnxruntime: threads).
    Raises BundleError, InputError for an option out of range, UnsupportedError, DependencyError.
    """
    path = Path(bundle)
    manifest = Manifest.read(path)
    check_consistent(path, manifest)
    check_files(path, manifest, hashes=verify)
    return Decoder(path, manifest, open_backend(backend, path, manifest, target, options))


class Decoder:
    """Made by `open_bundle`. Use as a context manager, or call `close`. Not thread-safe: one thread at a time."""

    def __init__(self, path: Path, manifest: Manifest, backend: Backend) -> None:
        self.path, self.manifest, self.backend = path, manifest, backend
        self._geometries = tuple(ring.geometry for ring in manifest.rings)
        self._free = list(range(manifest.batch))
        self._open = True

    @property
    def cache_bytes(self) -> int:
        """Bytes of all state tensors: constant for the decoder's whole life."""
        return self.manifest.cache_bytes

    def stream(self) -> Stream:
        """A fresh stream on a free row. Raises CapacityError when all rows are taken."""
        self.require_open()
        if not self._free:
            raise CapacityError(f"all {self.manifest.batch} rows of the bundle have a stream; close one, or export with a larger --batch")
        self.backend.reset_row(self._free[0])
        row = self._free.pop(0)
        return Stream(self, row)

    def release(self, row: int) -> None:
        """Called by a stream that closes."""
        self._free.append(row)

    def check_room(self, position: int, tokens: int) -> None:
        """Raises CapacityError if a stream at `position` cannot take `tokens` more."""
        limit = self.manifest.position_limit
        if position + tokens > limit:
            raise CapacityError(
                f"position {position} + {tokens} tokens is past {limit}, the last position with exact angles; reset the stream"
            )

    def run(self, row: int, position: int, tokens: NDArray[np.int64], all_logits: bool) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """Feed a row in chunks. Yields (start, stop, logits [stop-start,V] or [1,V]); the next call overwrites logits."""
        start = 0
        for length in split_chunks(position, len(tokens), self.manifest.chunk, self._geometries):
            stop = start + length
            at = position + start
            write_index = tuple(geometry.slot(at) for geometry in self._geometries)
            if length == 1 and self.manifest.batch == 1:
                yield start, stop, self._decode_one(int(tokens[start]), at, write_index)
            else:
                yield start, stop, self.backend.prefill(row, tokens[start:stop], at, write_index, all_logits)
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

    def _decode_one(self, token: int, position: int, write_index: tuple[int, ...]) -> NDArray[np.float32]:
        backend = self.backend
        backend.tokens[0, 0] = token
        backend.position[0] = position
        for buffer, index in zip(backend.write_index, write_index, strict=True):
            buffer[0] = index
        backend.decode()
        return backend.logits[0]
