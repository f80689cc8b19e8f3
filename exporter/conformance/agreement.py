"""I12: every form of the graphs agrees with every other and with eager PyTorch, per step, and the error does not grow with age."""

import numpy as np
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Logits, Subject, largest_difference
from sinkring.exporter.verdict import GROWTH_LIMIT, GROWTH_NOISE


def check_agreement(subject: Subject) -> Check:
    """The same tokens at a few ages through each decode graph and engine, token by token, and through prefill in one call."""
    tokens = len(subject.ids)
    count = min(32 if subject.full else 8, tokens // 3)
    starts = sorted({0, min(subject.full_at, tokens - count), tokens - count})
    targets = {subject.manifest.graph("decode", graph.target).path: graph.target for graph in subject.manifest.graphs}
    forms: dict[str, list[Logits]] = {}
    for done, (path, target) in enumerate(sorted(targets.items())):
        subject.say("I12", done, len(targets) + 1)
        forms[path] = _run(subject, target, starts, count, by_step=True)
    prefill = {subject.manifest.graph("prefill", graph.target).path: graph.target for graph in subject.manifest.graphs}
    for path, target in sorted(prefill.items()):
        forms[path] = _run(subject, target, starts, count, by_step=False)
    if subject.runs_engines:
        forms[f"the decode engine of {subject.backend}"] = _run(subject, None, starts, count, by_step=True)
        forms[f"the prefill engine of {subject.backend}"] = _run(subject, None, starts, count, by_step=False)
    subject.say("I12", len(targets) + 1, len(targets) + 1)
    worst, where = 0.0, ""
    faults = []
    for name, windows in forms.items():
        errors = [subject.off(logits, start) for start, logits in zip(starts, windows, strict=True)]
        pairs = [("the oracle", errors)]
        for other, others in forms.items():
            if other < name:
                pairs.append((other, [largest_difference(a, b) for a, b in zip(windows, others, strict=True)]))
        for other, differences in pairs:
            if max(differences) > worst:
                worst, where = max(differences), f"{name} and {other}, from position {starts[int(np.argmax(differences))]}"
        # Means of the steps' errors: one step in eight may be off by ten times as much as the others, at any age.
        young, old = (_mean_off(subject, windows[at], starts[at]) for at in (0, -1))
        if old > GROWTH_LIMIT * young and old > GROWTH_NOISE * subject.tolerance:
            faults.append(f"{name}: the error grows with age, from {young:.2e} to {old:.2e}")
    return Check(
        "I12",
        f"{', '.join(forms)} and eager PyTorch, {count} steps from each of positions {', '.join(map(str, starts))}",
        "max |Δlogit| between any two",
        worst,
        subject.tolerance,
        worst <= subject.tolerance and not faults,
        "; ".join([*faults, f"furthest apart: {where}"]),
    )


def _mean_off(subject: Subject, logits: Logits, start: int) -> float:
    return float(np.mean([subject.off(row, start + step) for step, row in enumerate(logits)]))


def _run(subject: Subject, target: str | None, starts: list[int], count: int, by_step: bool) -> list[Logits]:
    """float32 [count,V] from each start."""
    windows = []
    with subject.open(target, decode_graph=by_step and target is not None) as decoder, decoder.stream() as stream:
        for start in starts:
            if start > stream.position:
                stream.feed(subject.ids[stream.position : start])
            # Windows of a short text may overlap: what was already run is run from its beginning, in a new stream.
            elif start < stream.position:
                stream.reset()
                stream.feed(subject.ids[:start])
            piece = subject.ids[start : start + count]
            if by_step:
                windows.append(np.stack([decoder.step({stream: int(token)})[stream] for token in piece]))
            else:
                windows.append(stream.feed(piece, all_logits=True))
    return windows
