"""Token ids as a user gives them: checked against the vocabulary, with an error that names the first that is wrong."""

import operator
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import InputError

# In a history, the place of what was fed as an embedding.
NO_TOKEN = -1

Ids = Sequence[int] | NDArray[np.integer]


def check_ids(ids: Ids, vocab: int, call: str) -> NDArray[np.int64]:
    """int64 [n], n >= 1. Raises InputError, naming `call`, for what is no list of ids in [0, V)."""
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:  # rows of different lengths, or no numbers at all
        raise InputError(f"{call}: got {type(ids).__name__} that is no list of ids ({error}); give token ids in one dimension") from None
    if isinstance(ids, str | bytes):
        raise InputError(f"{call}: got {type(ids).__name__}, expected token ids; encode the text first, with TextCodec.encode")
    if array.ndim != 1 or not array.size:
        raise InputError(f"{call}: got ids of shape {array.shape}, expected at least one token id in one dimension")
    # numpy keeps integers beyond 64 bits as objects: those are refused below, as outside the vocabulary.
    if not np.issubdtype(array.dtype, np.integer) and not all(type(token) is int for token in array.tolist()):
        raise InputError(f"{call}: got ids of dtype {array.dtype}, expected integers")
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if wrong.size:
        raise InputError(f"{call}: ids[{wrong[0]}] is {array[wrong[0]]}, outside the vocabulary [0, {vocab}): use this bundle's tokenizer")
    return array.astype(np.int64)


def check_count(value: int, what: str) -> int:
    """A number of tokens, 0 or more. Raises InputError, naming `what`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise InputError(f"{what}={value!r}: must be a whole number, 0 or more")
    return int(value)


def check_stop_ids(stop_ids: Iterable[int], vocab: int) -> frozenset[int]:
    """Raises InputError for what is no list of ids in [0, V)."""
    try:
        stops = frozenset(operator.index(token) for token in stop_ids)
    except TypeError:
        raise InputError(f"stop_ids={stop_ids!r}: must be a list of token ids, () to never stop") from None
    if wrong := sorted(token for token in stops if not 0 <= token < vocab):
        raise InputError(f"stop_ids: {wrong[0]} is outside the vocabulary [0, {vocab}): was it made by this bundle's tokenizer?")
    return stops
