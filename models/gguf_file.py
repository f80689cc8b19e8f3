"""GGUF files: what transformers passes over without a word when it reads one, found out before it does; and reading each only once."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from sinkring.models.errors import SourceError, UnsupportedModel


@dataclass(frozen=True)
class GgufFacts:
    architecture: str
    has_tokenizer: bool


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Within the block a GGUF file is parsed once: loading a model asks for it four times, and a vocabulary takes seconds to parse.

    Safe because nothing here writes to a reader or a name map. Without the gguf package it does nothing: whoever needs it says so.
    """
    try:
        import gguf
    except ImportError:
        yield
        return
    with (
        patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def inspect_gguf(path: Path) -> GgufFacts:
    """Raises SourceError for a damaged file or one part of a split model, UnsupportedModel for rotary scaling that would be lost."""
    from gguf import GGUFReader  # Only GGUF sources need that package.

    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise SourceError(f"{path}: starts with {magic!r}, a GGUF file with {b'GGUF'!r}; copy it again, or give another model")
    try:
        # Lays out every tensor, and raises whatever it stumbles over when bytes are missing.
        reader = GGUFReader(str(path))  # as transformers names it
        architecture = str(reader.fields["general.architecture"].contents())
    except Exception as error:
        raise SourceError(f"{path}: is damaged or cut short, {path.stat().st_size} bytes ({error}); copy it again") from error
    split = reader.fields.get("split.count")
    if split is not None and int(split.contents()) > 1:
        raise SourceError(f"{path}: is one of {int(split.contents())} parts of a model; join them with `llama-gguf-split --merge`")
    # gpt-oss is the one architecture whose scaling transformers takes over.
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    if scaling is not None and scaling.contents() != "none" and architecture != "gpt-oss":
        raise UnsupportedModel(
            f"{path}: rope scaling {scaling.contents()!r} is lost when transformers reads a GGUF of {architecture}; "
            "give the model's safetensors folder"
        )
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise UnsupportedModel(
            f"{path}: scaled rotary frequencies (rope_freqs.weight) are lost when transformers reads a GGUF; "
            "give the model's safetensors folder"
        )
    return GgufFacts(architecture, has_tokenizer="tokenizer.ggml.model" in reader.fields)
