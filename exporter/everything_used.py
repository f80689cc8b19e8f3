"""I10 at every export: each weight and each state of the decode graphs changes the logits when it is changed, and each window ends.

The graphs are the very files that are about to be published. Their caches are filled with keys and values of a few tokens, over and over:
what a slot holds need not be right to show whether anything reads it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.influence import ATTEMPTS, ProbedGraph
from sinkring.exporter.new_rows import after_step, cache_outputs
from sinkring.runtime.backends.onnxruntime import decodes_with_prefill
from sinkring.runtime.bfloat16 import to_host
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Graph, Manifest, Ring
from sinkring.runtime.ring import RingGeometry

# Tokens whose keys and values fill the caches.
_TOKENS = 24
# Of the checks of one graph, how many make a line of progress.
_LINE_EVERY = 50

Change = Callable[[], dict[str, NDArray[Any]]]


def check_everything_used(bundle: Path, manifest: Manifest, say: Callable[[str], None]) -> None:
    """Raises UnsupportedError, by its name, for a weight, a state, a sink or a window of a decode graph that has no effect.

    A stacked weight of a mixture of experts counts as one: the experts that the tried tokens choose stand for it. A tensor of one number
    is a constant of the form and not tried. A bundle whose queries see themselves alone (S = 0, W = 1) is not tried: in it neither a query
    nor a key nor a state can matter.
    """
    if any(ring.geometry.sinks_tokens + ring.geometry.window_tokens == 1 for ring in manifest.rings):
        say("checking nothing of what counts: with a window of one token and no sinks neither queries nor keys nor states can matter")
        return
    for path in sorted({_decoding(manifest, graph.target).cpu_path for graph in manifest.graphs}):
        _check_graph(*_filled(bundle, path, manifest), path, manifest, say)


def _check_graph(graph: ProbedGraph, at: int, path: str, manifest: Manifest, say: Callable[[str], None]) -> None:
    tries: list[tuple[str, Change]] = [
        # From the last on, so that of all that a break makes dead the nearest to it is named.
        *((part.name, partial(graph.changed_weight, part)) for part in reversed(graph.parts)),
        *((state.name, partial(graph.changed_state, state.name)) for state in manifest.states),
        *_slots(graph, manifest, at),
    ]
    for done, (name, change) in enumerate(tries):
        if done % _LINE_EVERY == 0:
            say(f"checking that everything counts in {path}: {done} of {len(tries)}")
        if graph.effect(change()) == 0:
            raise UnsupportedError(
                f"{path}: {name} has no effect on the logits after any of {ATTEMPTS} tokens, so a part of the model is lost or was "
                "never used; this model is not supported"
            )
    for ring, change in _outside(graph, manifest, at):
        if effect := graph.effect(change()):
            window = ring.geometry.window_tokens
            raise UnsupportedError(
                f"{path}: a token that is older than the window of {window} tokens of layers {_shown(ring.layers)} changes the logits "
                f"by {effect:.2g}, so that window is not used; this model is not supported"
            )


def _filled(bundle: Path, path: str, manifest: Manifest) -> tuple[ProbedGraph, int]:
    """The graph with all its caches full as far as they can be, and the position of its next token."""
    vocab, batch = manifest.model.vocab_size, manifest.batch
    # One token past the end of every ring, or the last one that a linear cache takes.
    ends = [geometry.most_tokens for geometry in _geometries(manifest) if geometry.most_tokens is not None]
    at = min([end - 1 for end in ends] or [max(geometry.capacity for geometry in _geometries(manifest)) + 1])
    ids = np.random.default_rng(0).integers(0, vocab, _TOKENS + 1, dtype=np.int64)
    feeds: dict[str, NDArray[Any]] = {state.name: np.full(state.shape, to_host(state.initial, state.dtype)) for state in manifest.states}
    if any((graph.cpu_path, graph.role) == (path, "prefill") for graph in manifest.graphs):
        feeds["rows"] = np.zeros(1, np.int64)
    graph = ProbedGraph(bundle, path, feeds, manifest)
    update = next(graph.update for graph in manifest.graphs if path in (graph.path, graph.widened))
    fed = min(_TOKENS, at)
    for position in range(fed):
        _place(feeds, manifest, position, int(ids[position]), batch)
        feeds.update(after_step(feeds, manifest, update, graph.outputs(cache_outputs(manifest, update))))
    for state in manifest.states:
        if state.ring is not None:
            _spread(feeds[state.name], manifest.rings[state.ring].geometry, fed)
    _place(feeds, manifest, at, int(ids[fed]), batch)
    return graph, at


def _decoding(manifest: Manifest, target: str) -> Graph:
    """The graph that a stream of this target is decoded with."""
    return manifest.graph("prefill" if decodes_with_prefill(manifest, target) else "decode", target)


def _geometries(manifest: Manifest) -> tuple[RingGeometry, ...]:
    return tuple(ring.geometry for ring in manifest.rings)


def _place(feeds: dict[str, NDArray[Any]], manifest: Manifest, position: int, token: int, batch: int) -> None:
    feeds["tokens"] = np.full((batch, 1), token, np.int64)
    feeds["position"] = np.full(batch, position, np.int64)
    for ring in manifest.rings:
        feeds[ring.write_index] = np.full(batch, ring.geometry.slot(position), np.int64)


def _spread(array: NDArray[Any], geometry: RingGeometry, fed: int) -> None:
    """Copy the rows of the `fed` tokens to the slots that none has reached, in place. array [...,C,D]."""
    slots = range(geometry.capacity)
    held = [slot for slot in slots if geometry.token_at(slot, fed - 1) is not None] if fed else []
    # The first tokens of a text draw all attention to them, and so are left where they are.
    ordinary = [slot for slot in held if slot >= max(geometry.sinks_tokens, min(4, len(held) - 1))] or held
    for count, slot in enumerate(slot for slot in slots if slot not in held and ordinary):
        array[..., slot, :] = array[..., ordinary[count % len(ordinary)], :]


def _slots(graph: ProbedGraph, manifest: Manifest, at: int) -> Iterator[tuple[str, Change]]:
    """Each sink, and the oldest token of each window, in all layers of a ring at once."""
    for ring, names in _rings(manifest):
        geometry, layers = ring.geometry, _shown(ring.layers)
        for sink in range(min(geometry.sinks_tokens, at)):
            yield f"sink {sink} of layers {layers}", _changed(graph, names, sink)
        oldest = max(geometry.sinks_tokens, at - geometry.window_tokens + 1)
        if oldest < at:
            yield (
                f"the oldest of the {geometry.window_tokens} tokens in the window of layers {layers}",
                _changed(graph, names, geometry.slot(oldest)),
            )


def _outside(graph: ProbedGraph, manifest: Manifest, at: int) -> Iterator[tuple[Ring, Change]]:
    """A slot of each ring whose token is older than its window, where there is one: it must not count."""
    for ring, names in _rings(manifest):
        geometry = ring.geometry
        outside = at - geometry.window_tokens
        if geometry.wraps and geometry.slack and outside >= geometry.sinks_tokens:
            yield ring, _changed(graph, names, geometry.slot(outside))


def _rings(manifest: Manifest) -> Iterator[tuple[Ring, list[str]]]:
    for index, ring in enumerate(manifest.rings):
        yield ring, [state.name for state in manifest.states if state.ring == index]


def _changed(graph: ProbedGraph, names: list[str], slot: int) -> Change:
    return lambda: {state: array for name in names for state, array in graph.changed_state(name, [slot]).items()}


def _shown(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) if len(layers) <= 4 else f"{layers[0]}, {layers[1]}, .. {layers[-1]}"
