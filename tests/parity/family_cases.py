"""The parity table as data: which bundle is made of each row of TINY_FAMILIES, and how it is driven and judged.

Every layer with full attention gets S = 2 and W = 4 in 8 slots, sliding ones keep their trained windows of 5 to 8 tokens in 8 or 16 slots;
a stream of more than 50 tokens takes each ring past its third wrap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sinkring.exporter.export import export_decoder
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.runtime.decoder import Decoder
from sinkring.runtime.manifest import Policy
from sinkring.runtime.ring import RingGeometry

from tests.models.tiny_families import TINY_FAMILIES, TinyFamily, find_row, tiny_model
from tests.parity.tiny_bundles import TARGETS, text

SINKS, WINDOW, CHUNK, ROWS = 2, 4, 3, 2
CAPACITY = 60
# Prompts of different lengths, steps together, chunks in the middle of a ring, steps, a chunk at the end of one of the two.
PROMPTS, STEPS, CHUNKS, LAST = (7, 3), 17, (11, 4), 8


@dataclass(frozen=True)
class FamilyCase:
    """One bundle. kind: "streaming", "native", "capacity" (native), or "trained" for a model that has sliding layers alone."""

    row: str
    kind: str

    @property
    def tiny(self) -> TinyFamily:
        return find_row(self.row)

    @property
    def policy(self) -> Policy:
        return "streaming" if self.kind == "streaming" else "native"

    @property
    def sinks(self) -> int:
        """Native longrope has no angles for a sink that gets further away without end."""
        return 0 if self.kind in ("capacity", "trained") or (self.kind == "native" and "longrope" in self.row) else SINKS

    @property
    def window(self) -> int:
        return CAPACITY if self.kind in ("capacity", "trained") else WINDOW

    @property
    def options(self) -> dict[str, int]:
        """Of export_decoder."""
        if self.kind == "trained":
            return {}
        return {"capacity": CAPACITY} if self.kind == "capacity" else {"sinks": self.sinks, "window": WINDOW}


def cases(*kinds: str) -> list[FamilyCase]:
    """The cases of those kinds, of every row to which they apply."""
    return [FamilyCase(row.name, kind) for row in TINY_FAMILIES for kind in kinds if row.has_full_layers == (kind != "trained")]


@dataclass
class FamilyBundle:
    """An exported case and the model it was made from."""

    path: Path
    case: FamilyCase
    model: Any
    geometries: tuple[RingGeometry, ...]

    def oracle(
        self, ids: np.ndarray, sinks: int | None = None, window: int | None = None, policy: Policy | None = None, model: Any = None
    ) -> np.ndarray:
        """float32 [N,V]: what the bundle must give, or, with anything else, what it must not."""
        logits = streaming_logits if (policy or self.case.policy) == "streaming" else masked_dense_logits
        sinks = self.case.sinks if sinks is None else sinks
        return logits(self.model if model is None else model, torch.from_numpy(ids), sinks, window or self.case.window).numpy()


def export_case(case: FamilyCase, folder: Path) -> FamilyBundle:
    model = tiny_model(case.row)
    model.save_pretrained(folder / "model")
    manifest = export_decoder(
        folder / "model", folder / "bundle", policy=case.policy, chunk=CHUNK, batch=ROWS, targets=TARGETS, **case.options
    )
    return FamilyBundle(folder / "bundle", case, model, tuple(ring.geometry for ring in manifest.rings))


def texts() -> list[np.ndarray]:
    """One text for each row, int64 [N], of the lengths that `drive` feeds."""
    return [text(PROMPTS[row] + CHUNKS[row] + 2 * STEPS + (0, LAST)[row], seed=row) for row in range(ROWS)]


def drive(decoder: Decoder) -> list[np.ndarray]:
    """Feed `texts` to two streams side by side at different positions, one token at a time and in chunks. float32 [N,V] each."""
    ids, parts = texts(), [[], []]  # type: tuple[list[np.ndarray], list[list[np.ndarray]]]
    with decoder.stream() as one, decoder.stream() as two:
        streams = (one, two)

        def feed(row: int, tokens: int) -> None:
            at = streams[row].position
            parts[row].append(streams[row].feed(ids[row][at : at + tokens], all_logits=True))

        def step() -> None:
            logits = decoder.step({stream: int(ids[row][stream.position]) for row, stream in enumerate(streams)})
            for row, stream in enumerate(streams):
                parts[row].append(logits[stream][None])

        for lengths in (PROMPTS, CHUNKS):
            for row in range(ROWS):
                feed(row, lengths[row])
            for _ in range(STEPS):
                step()
        feed(1, LAST)
        assert [stream.position for stream in streams] == [len(row) for row in ids]
    return [np.concatenate(row) for row in parts]


def wrong_windows(row: TinyFamily) -> Iterator[tuple[str, Any]]:
    """The row's model with a trained window that is one off; its weights are the same."""
    window = next((window for window in row.sliding if window is not None), None)
    if window is None:
        return
    for off in (-1, 1):
        yield f"a trained window of {window + off}", tiny_model(row, sliding_window=window + off)
