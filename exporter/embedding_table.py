"""The embedding table of a bundle whose graphs take embedded rows: what the host looks tokens up in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sinkring.exporter.quantize import BlockMatrix
from sinkring.models.registry import Family
from sinkring.models.token_call import text_config
from sinkring.runtime.errors import InputError, UnsupportedError
from sinkring.runtime.manifest import Codebooks, Embedding

INPUTS = ("tokens", "embeddings")
TABLE_NAME = "embedding.npy"
# Rows that are embedded at a time.
_ROWS = 4096


def check_inputs(inputs: str | None) -> None:
    """Raises InputError for what is no kind of input."""
    if inputs is not None and inputs not in INPUTS:
        raise InputError(f"inputs={inputs!r} is not known; use one of {', '.join(INPUTS)}")


def takes_embeddings(family: Family, inputs: str | None) -> bool:
    """Whether the graphs are to take embedded rows: as asked, or else as the family needs. Raises UnsupportedError for what it can't."""
    if inputs == "tokens" and family.beside_tokens:
        raise UnsupportedError(
            f"architecture {family.name!r} with inputs='tokens': its steps take {family.beside_tokens} beside the token; "
            "use inputs='embeddings', its default"
        )
    return bool(family.beside_tokens) or inputs == "embeddings"


def lookup_of(model: Any, family: Family) -> torch.nn.Module:
    """The module that makes a row [hidden] of each id."""
    module: torch.nn.Module = family.lookup(model) if family.lookup else model.get_input_embeddings()
    return module


def write_embedding(folder: Path, model: Any, family: Family, blocks: Mapping[str, BlockMatrix]) -> Embedding:
    """Write every row as the model's own module makes it, factors included, in float16 for a float16 model, else in float32.

    blocks: see StoredWeights.by_initializer.

    A table that is the head, too, has the numbers that the head is stored with.
    """
    lookup, hidden = lookup_of(model, family), text_config(model).hidden_size
    weight: torch.Tensor = lookup.get_parameter("weight")
    matrix = next((blocks.get(f"model.{name}") for name, other in model.named_parameters() if other is weight), None)
    if matrix is not None:
        weight = torch.from_numpy(matrix.dequantized()).to(weight.dtype)
    rows = len(weight)
    # NumPy has no bfloat16.
    dtype = "float16" if weight.dtype == torch.float16 else "float32"
    table = np.lib.format.open_memmap(folder / TABLE_NAME, "w+", np.dtype(dtype), (rows, hidden))
    with torch.no_grad():
        for start in range(0, rows, _ROWS):
            ids = torch.arange(start, min(start + _ROWS, rows))
            table[start : start + len(ids)] = torch.func.functional_call(lookup, {"weight": weight}, (ids,)).float().numpy()
    table.flush()
    books = family.codebooks(text_config(model)) if family.codebooks else None
    return Embedding(TABLE_NAME, rows, hidden, dtype, None if books is None else Codebooks(**books))
