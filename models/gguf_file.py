"""GGUF files: what transformers passes over without a word when it reads one, found out before it does; and reading each only once."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from sinkring.models.errors import SourceError
from sinkring.models.gguf_settings import check_gguf_tensors


@dataclass(frozen=True)
class GgufFacts:
    """settings: the keys of the architecture and `general.type`, with their values. tensors: their names."""

    architecture: str
    has_tokenizer: bool
    settings: dict[str, Any]
    tensors: tuple[str, ...]


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
        patch.object(gguf, "GGUFReader", functools.cache(_plain_reader(gguf.GGUFReader))),
        patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def _plain_reader(reader: Any) -> Any:
    """A GGUFReader whose arrays are plain ones of the mapped file: of numpy's memmap each small view takes ten times as long."""

    class PlainReader(reader):
        data: Any

        def _get(self, *args: Any, **options: Any) -> Any:
            self.data = self.data.view(np.ndarray)
            return super()._get(*args, **options)

    return PlainReader


def inspect_gguf(path: Path) -> GgufFacts:
    """Raises SourceError for a damaged file or one part of a split model."""
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
    # Not those of the tokenizer, whose vocabulary takes seconds to decode.
    said = {name: field.contents() for name, field in reader.fields.items() if name.startswith((f"{architecture}.", "general.type"))}
    return GgufFacts(architecture, "tokenizer.ggml.model" in reader.fields, said, tuple(tensor.name for tensor in reader.tensors))


def check_all_read(path: Path, facts: GgufFacts, model: Any) -> None:
    """Raises UnsupportedModel for a tensor of the file that `model`, which was loaded from it, has no place for."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(facts.architecture, TensorProcessor)(config={})
    check_gguf_tensors(path, facts.tensors, get_gguf_hf_weights_map(model, processor))
