"""I10, everything counts: each weight, each state and each sink slot of every graph changes the logits when it is changed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Subject
from sinkring.exporter.influence import Part, ProbedGraph

# Of each state, in the full suite: a run of the graph for each.
MOST_WINDOW_SLOTS = 16


def check_everything(subject: Subject) -> Check:
    """Quick: of each kind of weight one, the sinks of the first and last layer, of each state the oldest slot. Full: every weight, sink."""
    dead: list[str] = []
    faults: list[str] = []
    tried: list[str] = []
    smallest, which = float("inf"), ""
    states = _states_at_full_ring(subject)
    for path in sorted({graph.cpu_path for graph in subject.manifest.graphs}):
        graph = _Graph(subject, path, states)
        off = subject.off(graph.logits({}, 0), subject.full_at + graph.tokens - 1)
        if not off <= subject.tolerance:
            faults.append(f"{path}: is {off:.2e} from the oracle before anything is changed")
        parts, slots = graph.chosen_parts(subject.full), graph.slots(subject.full)
        tried.append(f"{path}: {len(parts)} weights, {len(slots)} slots of states")
        items: list[Part | tuple[str, int]] = [*parts, *slots]
        for done, item in enumerate(items):
            subject.say(f"I10: {path}", done, len(items))
            if isinstance(item, Part):
                name, effect = item.name, graph.effect(graph.changed_weight(item))
            else:
                name, effect = f"slot {item[1]} of {item[0]}", graph.effect(graph.changed_state(item[0], [item[1]]))
            if effect == 0:
                dead.append(f"{path}: {name}")
            elif effect < smallest:
                smallest, which = effect, f"{path}: {name}"
        subject.say(f"I10: {path}", 1, 1)
    detail = [f"dead: {', '.join(dead[:3])}"] if dead else [f"the smallest effect is {smallest:.2e}, of {which}"]
    return Check(
        "I10", "; ".join(tried), "dead tensors and slots", float(len(dead)), 0.0, not dead and not faults, "; ".join(faults + detail)
    )


def _states_at_full_ring(subject: Subject) -> dict[str, NDArray[Any]]:
    """Every state of the whole batch, each row filled with the same text up to `full_at`."""
    with subject.open() as decoder:
        streams = [decoder.stream() for _ in range(subject.manifest.batch)]
        for stream in streams:
            stream.feed(subject.ids[: subject.full_at])
        rows = [decoder.backend.read_row(row) for row in range(subject.manifest.batch)]
    return {state.name: np.concatenate([row[state.name] for row in rows], axis=state.batch_axis) for state in subject.manifest.states}


class _Graph(ProbedGraph):
    """One graph, its next tokens and state."""

    def __init__(self, subject: Subject, path: str, states: dict[str, NDArray[Any]]) -> None:
        self._subject = subject
        manifest, at = subject.manifest, subject.full_at
        decodes = path in {graph.cpu_path for graph in manifest.graphs if graph.role == "decode"}
        batch = manifest.batch if decodes else 1
        # Prefill is run with more than one token where it can, but not across the end of a ring.
        self.tokens = 1 if decodes else min(3, manifest.chunk, *(geometry.room(at) for geometry in subject.geometries))
        piece = subject.ids[at : at + self.tokens]
        self._states = {
            state.name: states[state.name] if decodes else states[state.name].take([0], axis=state.batch_axis) for state in manifest.states
        }
        feeds: dict[str, NDArray[Any]] = {
            "tokens": np.tile(piece, (batch, 1)),
            "position": np.full(batch, at, np.int64),
            **{ring.write_index: np.full(batch, ring.geometry.slot(at), np.int64) for ring in manifest.rings},
            **({} if decodes else {"rows": np.array([self.tokens - 1], np.int64)}),
            **self._states,
        }
        super().__init__(subject.path, path, feeds, manifest)

    def chosen_parts(self, every: bool) -> list[Part]:
        if every:
            return self.parts
        # The last of each kind: the layer whose effect has the shortest way, so that a dead one is not hidden by what follows.
        return list({part.kind: part for part in self.parts}.values())

    def slots(self, every: bool) -> list[tuple[str, int]]:
        """(state, slot): the sinks, and of the window the oldest token, or some from the oldest to the newest."""
        at, last = self._subject.full_at, self._subject.full_at + self.tokens - 1
        geometries = {state.name: self._subject.geometries[state.ring] for state in self._subject.manifest.states if state.ring is not None}
        with_sinks = [name for name, geometry in geometries.items() if geometry.sinks_tokens]
        ends = with_sinks if every or len(with_sinks) <= 8 else [*with_sinks[:2], *with_sinks[-2:]]
        found = [(name, slot) for name in ends for slot in range(min(geometries[name].sinks_tokens, at))]
        for name, geometry in geometries.items():
            window = range(max(geometry.sinks_tokens, last - geometry.window_tokens + 1), at)
            tokens = window[:: -(-len(window) // MOST_WINDOW_SLOTS)] if every and len(window) else window[:1]
            found += [(name, geometry.slot(token)) for token in tokens]
        return found
