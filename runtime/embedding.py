"""The embedding of a bundle whose graphs take embedded rows: the table beside them, and rows as a user gives them."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sinkring.runtime.errors import BundleError, InputError
from sinkring.runtime.manifest import Embedding
from sinkring.runtime.token_ids import Ids, check_ids

Rows = NDArray[np.float32]


class EmbeddingTable:
    """A table float [rows, hidden] in a NumPy file, mapped: only the rows that are looked up are read.

    Raises BundleError for a file that is not what the manifest says.
    """

    def __init__(self, bundle: Path, embedding: Embedding) -> None:
        path = bundle / embedding.table
        self._codebooks = embedding.codebooks
        try:
            self._table: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: is no NumPy file ({error}); the bundle is damaged, export again") from None
        found = (str(self._table.dtype), self._table.shape)
        expected = (embedding.dtype, (embedding.rows, embedding.hidden_size))
        if found != expected:
            raise BundleError(f"{path}: is {found[0]} {found[1]}, {expected[0]} {expected[1]} by the manifest; export again")
        self.rows, self.hidden_size = expected[1]
        # What a token has for codes where nothing is heard: a row of zeros in most models, and then nothing to add.
        silence = None if self._codebooks is None else self._codebooks.count * self._table[self._codebooks.silence].astype(np.float32)
        self._silence = silence if silence is not None and silence.any() else None

    def of_tokens(self, ids: NDArray[np.int64]) -> Rows:
        """float32 [n, hidden] of ids int64 [n] in [0, rows); in a model with codebooks, silence in each."""
        rows: Rows = self._table[ids].astype(np.float32)
        if self._silence is not None:
            rows += self._silence
        return rows

    def put_token(self, token: int, out: Rows) -> None:
        """The same of one token, into `out` float32 [hidden]."""
        out[:] = self._table[token]
        if self._silence is not None:
            out += self._silence

    def embed(self, ids: Ids, codes: ArrayLike | None) -> Rows:
        """float32 [T, hidden] of ids [T] in [0, rows) and codes [T, K] of K codebooks, without codes silence. Raises InputError."""
        tokens = check_ids(ids, self.rows, "embed")
        if codes is None:
            return self.of_tokens(tokens)
        books = self._codebooks
        if books is None:
            raise InputError("embed: got codes, and this model has no codebooks; give ids alone, and add what comes beside them")
        given = np.asarray(codes)
        if given.shape != (len(tokens), books.count) or not np.issubdtype(given.dtype, np.integer):
            raise InputError(f"embed: got codes {given.dtype} {given.shape}, expected integers ({len(tokens)}, {books.count})")
        silent = given == books.silence
        if wrong := given[~silent & ((given < 0) | (given >= books.size))].tolist():
            raise InputError(f"embed: code {wrong[0]} is outside [0, {books.size}) and is not {books.silence}, which stands for silence")
        at = np.where(silent, given, books.first + np.arange(books.count) * books.size + given)
        rows: Rows = self._table[tokens].astype(np.float32)
        for book in range(books.count):
            rows += self._table[at[:, book]]
        return rows


def check_rows(rows: ArrayLike, hidden_size: int, call: str) -> Rows:
    """float32 [T, hidden], T >= 1. Raises InputError, naming `call`, for other shapes or types and for the first row that is not finite."""
    try:
        array = np.asarray(rows)
    except (ValueError, TypeError) as error:  # rows of different lengths, a tensor on a GPU, or no numbers at all
        raise InputError(f"{call}: got {type(rows).__name__} that is no array ({error}); give float32 (T, {hidden_size})") from None
    if array.dtype not in (np.float32, np.float16):
        ids = "; token ids go to feed, or through Decoder.embed" if np.issubdtype(array.dtype, np.integer) else ""
        raise InputError(f"{call}: got rows of dtype {array.dtype}, expected float32 (or float16){ids}")
    if array.ndim != 2 or array.shape[1] != hidden_size or not len(array):
        raise InputError(f"{call}: got rows of shape {array.shape}, expected (T, {hidden_size}) with T of 1 or more")
    wrong = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if wrong.size:
        raise InputError(f"{call}: row {wrong[0]} of {len(array)} holds NaN or an infinity; mend what made it, nothing was fed")
    return np.ascontiguousarray(array, np.float32)
