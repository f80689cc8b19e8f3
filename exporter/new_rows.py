"""A step of a graph by itself, its caches threaded by hand: what its outputs make of them, whichever way it updates them."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from sinkring.runtime.manifest import Manifest, Update, rows_name


def cache_outputs(manifest: Manifest, update: Update) -> list[str]:
    """The outputs that carry what a call did to each state, in the manifest's order."""
    return [rows_name(state.name) if update == "rows" else state.updated for state in manifest.states]


def after_step(
    feeds: Mapping[str, NDArray[Any]], manifest: Manifest, update: Update, outputs: Sequence[NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The states [B,...] by name after a call with `feeds` whose cache outputs these are. The arrays in `feeds` stay as they are."""
    after = {}
    for state, out in zip(manifest.states, outputs, strict=True):
        if update == "in_place":
            after[state.name] = out
            continue
        assert state.ring is not None, "only caches have rows"
        cache = after[state.name] = feeds[state.name].copy()
        for row, slot in enumerate(feeds[manifest.rings[state.ring].write_index].tolist()):
            cache[row, :, slot : slot + out.shape[2]] = out[row]
    return after
