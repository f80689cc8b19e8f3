"""The bundle under test, and what all checks measure it with: one text, and the oracle's logits for it.

What is right is taken from the bundle's manifest as it was found and from the oracle; what is run is opened from `path`, which under
sabotage is a copy that is broken on purpose.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.expected_logits import Expected, Progress
from sinkring.exporter.geometries import leading_geometry, most_tokens
from sinkring.exporter.influence import largest_difference
from sinkring.exporter.reference_text import ReferenceIds
from sinkring.runtime.backends.engine import MODULES
from sinkring.runtime.decoder import Decoder, open_bundle
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.ring import RingGeometry
from sinkring.runtime.stream import Stream

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Subject:
    """path: the bundle that is run. manifest: what it must be. expected: the oracle over the N ids of `reference`.

    tolerance: of |logits - expected|. scratch: a folder that is emptied afterwards. budget_s: seconds that a check which could go on for
    ever may take.
    """

    path: Path
    manifest: Manifest
    full: bool
    backend: str
    reference: ReferenceIds
    expected: Expected
    tolerance: float
    scratch: Path
    budget_s: float
    say: Progress
    sabotage: str | None = None

    @property
    def geometry(self) -> RingGeometry:
        """Of the ring that wraps last: what has happened to it has happened to all."""
        return leading_geometry(self.manifest)

    @property
    def geometries(self) -> tuple[RingGeometry, ...]:
        """Of each ring, as the manifest lists them."""
        return tuple(ring.geometry for ring in self.manifest.rings)

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a stream can have at most, because of a linear cache."""
        return most_tokens(self.manifest)

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 [N]."""
        return self.reference.ids

    @property
    def full_at(self) -> int:
        """A position from which on each token overwrites another one in every ring; in caches that never do, one with room behind it.

        Beside a linear cache whose capacity ends before a ring has wrapped, too.
        """
        wrapped = self.geometry.capacity + 1
        return wrapped if self.geometry.wraps and wrapped < len(self.ids) else len(self.ids) // 2

    @property
    def runs_engines(self) -> bool:
        """Whether the backend runs engines, which are those of its own target, and not the graphs themselves."""
        return self.backend in MODULES

    def open(self, target: str | None = None, decode_graph: bool = False) -> Decoder:
        """A decoder of its own, with fresh state. Close it. With a target its graphs themselves are run.

        decode_graph: its decode graph for single tokens, also where ONNX Runtime decodes with the prefill graph.
        """
        backend = "onnxruntime" if target is not None and self.runs_engines else self.backend
        return open_bundle(
            self.path, backend, target=target, verify=False, alarms=False, **({"one_session": False} if decode_graph else {})
        )

    def off(self, logits: Logits, position: int) -> float:
        """Largest |error| of logits [V] or [T,V] against the oracle's from `position` on; infinite if one is not finite."""
        rows = np.atleast_2d(logits)
        return largest_difference(rows, self.expected.logits[position : position + len(rows)])

    def other_ids(self, count: int, seed: int) -> NDArray[np.int64]:
        """Ids that have nothing to do with the text, int64 [count]."""
        return np.random.default_rng(seed).integers(0, self.manifest.model.vocab_size, count, dtype=np.int64)


def stream_on_row(decoder: Decoder, row: int) -> Stream:
    """A fresh stream on this very row of a decoder whose rows are all free."""
    passed_over = []
    while (stream := decoder.stream()).row != row:
        passed_over.append(stream)
    for other in passed_over:
        other.close()
    return stream


def feed_in_pieces(stream: Stream, ids: NDArray[np.int64], lengths: tuple[int, ...]) -> Logits:
    """Feed ids [n] in calls of these lengths, again and again; all logits, float32 [n,V]."""
    parts, start, turn = [], 0, 0
    while start < len(ids):
        stop = start + lengths[turn % len(lengths)]
        parts.append(stream.feed(ids[start:stop], all_logits=True))
        start, turn = stop, turn + 1
    return np.concatenate(parts)
