"""The ids of a raw prompt: what the model saw at the start of a text, which only its tokenizer file says."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Tokenizer
from sinkring.runtime.text import TextCodec


def encode_prompt(bundle: Path, codec: TextCodec, text: str) -> NDArray[np.int64]:
    """Ids int64 [T], T >= 1, of a text that opens a stream: with the BOS in front if the bundle's tokenizer puts one there by itself.

    That a model has a BOS token does not mean that its texts begin with it: for many chat models it opens a turn.
    Raises InputError for an empty text and for lone surrogates.
    """
    if not text:
        raise InputError("the prompt is empty: the model needs at least one token to go on from; give some text")
    return codec.encode(text, add_bos=adds_bos(bundle, codec.info))


def adds_bos(bundle: Path, info: Tokenizer) -> bool:
    """Whether the bundle's tokenizer file puts the model's BOS in front of a text."""
    import tokenizers

    if info.bos_id is None:
        return False
    ids: list[int] = tokenizers.Tokenizer.from_file(str(bundle / info.tokenizer)).encode("").ids
    return ids[:1] == [info.bos_id]
