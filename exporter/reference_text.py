"""The token ids that a bundle is validated on: real text where there is a tokenizer, for only real text shows a model's attention sinks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.text import TextCodec

RANDOM_SEED = 0


@dataclass(frozen=True)
class ReferenceIds:
    """ids: int64 [N]; origin: where they come from, in words."""

    ids: NDArray[np.int64]
    origin: str


def read_reference_ids(bundle: Path, manifest: Manifest, tokens: int) -> ReferenceIds:
    """The first `tokens` ids of the text, BOS included, by the bundle's tokenizer; of a bundle without one, seeded random ids.

    Raises InputError if the text is shorter, BundleError for a damaged tokenizer, DependencyError without the package `tokenizers`.
    """
    if manifest.tokenizer is None:
        ids = np.random.default_rng(RANDOM_SEED).integers(0, manifest.model.vocab_size, tokens, dtype=np.int64)
        return ReferenceIds(ids, f"random ids, seed {RANDOM_SEED} (the bundle has no tokenizer)")
    ids = TextCodec.open(bundle, manifest.tokenizer).encode(python_topics(), add_bos=True)
    if len(ids) < tokens:
        raise InputError(f"{bundle}: steps={tokens}, but the reference text has {len(ids)} tokens; use steps <= {len(ids)}")
    return ReferenceIds(ids[:tokens], "Python's help topics (pydoc_data.topics)")


def python_topics() -> str:
    """Python's help topics as one English text of more than 400,000 characters: long real text that every machine with Python has."""
    from pydoc_data.topics import topics

    # Their order in the dictionary is nobody's promise.
    return "\n\n".join(topics[name] for name in sorted(topics))
