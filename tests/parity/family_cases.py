"""The parity table: which bundle is made of each row of TINY_FAMILIES, how it is driven, and what it must and must not give.

Each layer with full attention gets S = 2 and W = 4 in 8 slots, sliding ones keep their trained windows of 5 to 8 tokens in 8 or 16 slots: a
stream of more than 50 tokens takes every ring past its third wrap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sinkring.exporter.export import export_decoder
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.models.refused import REFUSED
from sinkring.models.registry import families, supported_here
from sinkring.runtime.decoder import Decoder, open_bundle
from sinkring.runtime.manifest import PORTABLE_TARGET, Policy

from tests.models.tiny_families import TINY_FAMILIES, TinyFamily, find_row, tiny_model
from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import TARGETS, text

SINKS, WINDOW, CHUNK, ROWS, CAPACITY = 2, 4, 3, 2, 48
# Prompts of different lengths, steps together, chunks in the middle of a ring, steps, a chunk at the end of one of the two.
PROMPTS, STEPS, CHUNKS, LAST = (7, 3), 17, (11, 4), 9


@dataclass(frozen=True)
class FamilyCase:
    """One bundle. kind: "streaming", "native", "capacity" (policy native, too), or "trained" for a model that has only sliding layers."""

    row: str
    kind: str

    def __str__(self) -> str:
        return f"{self.row}, {self.kind}"

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
        if self.kind == "capacity" and "longrope" in self.row:
            return 32  # of its short factors, the only ones of a native stream
        return {"capacity": CAPACITY, "trained": 1}.get(self.kind, WINDOW)

    @property
    def options(self) -> dict[str, int]:
        """Of export_decoder."""
        if self.kind == "trained":
            return {}
        return {"capacity": self.window} if self.kind == "capacity" else {"sinks": self.sinks, "window": self.window}

    @property
    def policies_differ(self) -> bool:
        """Not where the layers that have sinks turn nothing. A model of which no layer does has ALiBi."""
        full = [turned for window, turned in zip(self.tiny.sliding, self.tiny.rotary, strict=True) if window is None]
        return self.sinks > 0 and (any(full) or not any(self.tiny.rotary))


def cases(*kinds: str) -> list[FamilyCase]:
    """The cases of those kinds, of every row to which they apply; some rows are for the oracle alone, some not for an old transformers."""
    rows = [row for row in TINY_FAMILIES if row.name not in REFUSED and supported_here(families()[row.name.split("-")[0]])]
    return [FamilyCase(row.name, kind) for row in rows for kind in kinds if row.has_full_layers == (kind != "trained")]


# Those that are driven in the form of TensorRT 10.3, too: graphs that read the rings and give out new rows, which the runtime writes. What
# the form itself decides: rotary and ALiBi, softcap, learned sink logits, rings of several geometries, a linear cache beside them.
AS_ROWS = (
    FamilyCase("llama", "streaming"),
    FamilyCase("gemma2", "streaming"),
    FamilyCase("gemma3_text", "native"),
    FamilyCase("gpt_oss", "streaming"),
    FamilyCase("bloom", "streaming"),
    FamilyCase("ministral", "capacity"),
)


def check_family(case: FamilyCase, folder: Path) -> None:
    """Export, drive the graphs of each target, compare all logits with the oracle's, and see that wrong oracles are told apart."""
    targets = (*TARGETS, PORTABLE_TARGET) if case in AS_ROWS else TARGETS
    model = tiny_model(case.row)
    model.save_pretrained(folder / "model")
    export_decoder(folder / "model", folder / "bundle", policy=case.policy, chunk=CHUNK, batch=ROWS, targets=targets, **case.options)
    ids = _texts(case)
    expected = _oracle(case, model, ids)
    actual = []
    for target in targets:
        with open_bundle(folder / "bundle", target=target, threads=1) as decoder:
            actual = _drive(decoder, ids)
        for row in range(ROWS):
            assert_parity(actual[row], expected[row], what=f"{case}, {target}, row {row}")
    for what, wrong in _controls(case, model, ids):
        assert_loudly_wrong(np.concatenate(actual), np.concatenate(wrong), f"{case}: {what}")


def _texts(case: FamilyCase) -> list[np.ndarray]:
    """One text for each row, int64 [N], of the lengths that `_drive` feeds; as much as fits a cache that does not wrap."""
    lengths = (PROMPTS[row] + CHUNKS[row] + 2 * STEPS + (0, LAST)[row] for row in range(ROWS))
    return [text(min(length, case.window) if case.kind == "capacity" else length, seed=row) for row, length in enumerate(lengths)]


def _drive(decoder: Decoder, ids: list[np.ndarray]) -> list[np.ndarray]:
    """Feed two streams side by side at different positions, one token at a time and in chunks. float32 [N,V] each."""
    parts: list[list[np.ndarray]] = [[] for _ in ids]
    with decoder.stream() as one, decoder.stream() as two:
        streams = (one, two)

        def feed(row: int, tokens: int) -> None:
            at = streams[row].position
            if len(rest := ids[row][at : at + tokens]):
                parts[row].append(streams[row].feed(rest, all_logits=True))

        def step() -> None:
            going = {row: stream for row, stream in enumerate(streams) if stream.position < len(ids[row])}
            logits = decoder.step({stream: int(ids[row][stream.position]) for row, stream in going.items()}) if going else {}
            for row, stream in going.items():
                parts[row].append(logits[stream][None])

        for lengths in (PROMPTS, CHUNKS):
            for row in range(ROWS):
                feed(row, lengths[row])
            for _ in range(STEPS):
                step()
        feed(1, LAST)
        assert [stream.position for stream in streams] == [len(row) for row in ids]
    return [np.concatenate(row) for row in parts]


def _oracle(
    case: FamilyCase, model: Any, ids: list[np.ndarray], sinks: int = 0, window: int = 0, policy: Policy | None = None
) -> list[np.ndarray]:
    """float32 [N,V] of each text: what the bundle must give, or, with `sinks` and `window` further, or another policy, must not."""
    logits = streaming_logits if (policy or case.policy) == "streaming" else masked_dense_logits
    return [logits(model, torch.from_numpy(row), case.sinks + sinks, case.window + window).numpy() for row in ids]


def _controls(case: FamilyCase, model: Any, ids: list[np.ndarray]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Oracles that are wrong in one thing, each with what it is."""
    if case.kind != "trained":
        yield "a window one shorter", _oracle(case, model, ids, window=-1)
    if case.kind in ("native", "streaming"):
        yield "a window one longer", _oracle(case, model, ids, window=1)
    if case.sinks:
        yield "a missing sink", _oracle(case, model, ids, sinks=-1)
    if case.policies_differ:
        other: Policy = "native" if case.policy == "streaming" else "streaming"
        yield f"positions of the {other} policy", _oracle(case, model, ids, policy=other)
    if trained := [window for window in case.tiny.sliding if window is not None]:
        for window in (trained[0] - 1, trained[0] + 1):
            yield f"a trained window of {window}", _oracle(case, tiny_model(case.row, sliding_window=window), ids)
