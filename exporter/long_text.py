"""Long texts to score a model on: a file of the user's, or one of those that many machines have, by name."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.reference_text import RANDOM_SEED, ReferenceIds, python_topics
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.prompt import encode_prompt
from sinkring.runtime.text import TextCodec

# Each verse on lines of 72 characters; public domain.
_KING_JAMES = ("bible", "-l72", "gen1:1-rev22:21")
NAMES = ("topics", "kjv")


def read_text(source: str) -> str:
    """`source`: "topics" (Python's help, 0.4 MB), "kjv" (the King James Bible by Debian's `bible-kjv`, 4.3 MB), or a UTF-8 file.

    Raises InputError for what is not there or no text.
    """
    if source == "topics":
        return python_topics()
    if source == "kjv":
        if shutil.which(_KING_JAMES[0]) is None:
            raise InputError("text 'kjv' needs the program `bible`: apt-get install bible-kjv, or give a file")
        return subprocess.run(_KING_JAMES, capture_output=True, text=True, check=True).stdout
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InputError(f"text {source!r}: cannot be read ({why}); give a UTF-8 file or one of the names {', '.join(NAMES)}") from None


def read_long_ids(bundle: Path, manifest: Manifest, source: str) -> ReferenceIds:
    """The ids of a whole text (see `read_text`) as a prompt would have them; "random" is 100,000 seeded random ids, for any bundle.

    Raises InputError as `read_text` does and for a bundle without tokenizer, BundleError for a damaged tokenizer, DependencyError.
    """
    if source == "random":
        ids = np.random.default_rng(RANDOM_SEED).integers(0, manifest.model.vocab_size, 100_000, dtype=np.int64)
        return ReferenceIds(ids, f"random ids, seed {RANDOM_SEED}")
    codec = TextCodec.open(bundle, manifest.tokenizer)
    return ReferenceIds(encode_prompt(bundle, codec, read_text(source)), source)


def text_at(ids: NDArray[np.int64], position: int, tokens: int) -> NDArray[np.int64]:
    """`tokens` ids from `position` on, of a text that begins anew at its end."""
    return np.take(ids, np.arange(position, position + tokens), mode="wrap")
