"""compare_runners: do two runtimes, settings or forms of one decode graph compute the same, and where do they part if not?

Every runner threads its own states from step to step. Teacher-forced, all are fed one text and each step's logits are compared;
free-running, each goes on from a prompt by its own likeliest tokens. At the first step whose logits differ by more than the tolerance both
graphs run once more, from the same states, with what both have inside as outputs: the first of these that differs names layer and node.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.comparator import IterationResult, SimpleCompareFunc
from polygraphy.logger import G_LOGGER
from sinkring.exporter.compare_runners import RunnerSpec, ThreadedRunner, infer, parse_runner
from sinkring.exporter.machine import Machine, describe_machine
from sinkring.exporter.marked_outputs import find_marks, last_of_each_layer, mark_outputs
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.exporter.verdict import find_limits
from sinkring.runtime.bfloat16 import from_host, to_host, widen_bfloat16
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.prompt import encode_prompt
from sinkring.runtime.text import TextCodec

DEFAULT_RUNNERS = ("onnxruntime", "tensorrt-rtx")
PROMPT_TOKENS = 8
Progress = Callable[[str, int, int], None]
_Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Step:
    """One token of the text. error: largest |Δlogit|; share: of the reference's largest |logit|; agrees: the same likeliest token."""

    position: int
    error: float
    share: float
    agrees: bool


@dataclass(frozen=True)
class FirstDifference:
    """Where two graphs part, fed the same. step: position in the text; layer None: outside the layers, `place` says on which side.

    node makes `value`, by their names in the reference's graph; share: largest |difference|, of the largest |value|.
    """

    step: int
    layer: int | None
    place: str
    node: str
    value: str
    share: float


@dataclass(frozen=True)
class Pair:
    """One runner against the reference. first: None if no step differs. tokens: of the free run; parted: index of the first other one."""

    runner: str
    steps: tuple[Step, ...]
    first: FirstDifference | None
    tokens: tuple[int, ...]
    parted: int | None

    @property
    def worst(self) -> Step:
        return max(self.steps, key=lambda step: step.share)


@dataclass(frozen=True)
class Comparison:
    """reference: a runner; tokens: its free run. tolerance: largest share of max |logit| that passes."""

    bundle: str
    against: str | None
    reference: str
    text: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    tolerance: float
    pairs: tuple[Pair, ...]
    machine: Machine

    @property
    def passed(self) -> bool:
        return all(step.share <= self.tolerance for pair in self.pairs for step in pair.steps)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


def compare_runners(
    bundle: str | Path,
    runners: Sequence[str] = DEFAULT_RUNNERS,
    *,
    against: str | Path | None = None,
    prompt: str | None = None,
    steps: int = 64,
    tokens: int = 32,
    tolerance: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Hold each of `runners` (see `parse_runner`) against the first, on the decode graphs of `bundle`.

    against: another bundle of the same sizes; the first runner then runs `bundle`, all others (or, of one, the same) run `against`.
    prompt: what the free run of `tokens` goes on from; default: the text's first tokens. steps: tokens of the text. tolerance: of max
    |logit|, default that of `validate`. threads: of ONNX Runtime.
    Raises InputError (runners, numbers, bundles of other sizes), UnsupportedError, BundleError, and DependencyError without a GPU where
    an engine is to run.
    """
    path = Path(bundle)
    manifest = Manifest.read(path)
    other_path = path if against is None else Path(against)
    other = manifest if against is None else Manifest.read(other_path)
    _check_same_sizes(path, manifest, other_path, other)
    for name, value in (("steps", steps), ("tokens", tokens)):
        if value < 1:
            raise InputError(f"{name}={value}: must be 1 or more")
    if tolerance is None:
        tolerance = max(find_limits(path, manifest).relative, find_limits(other_path, other).relative)
    specs = _specs(runners, path, manifest, other_path, other, against is not None)
    reference = read_reference_ids(path, manifest, max(steps, PROMPT_TOKENS))
    start = (
        reference.ids[:PROMPT_TOKENS].tolist()
        if prompt is None
        else encode_prompt(path, TextCodec.open(path, manifest.tokenizer), prompt).tolist()
    )
    room = min((ring.geometry.most_tokens for ring in manifest.rings if ring.geometry.most_tokens is not None), default=None)
    if room is not None and max(steps, len(start) + tokens) > room:
        raise InputError(f"steps={steps}, tokens={tokens}: a stream of this bundle is full after {room} tokens; use fewer")
    say: Progress = progress or (lambda stage, done, total: None)
    with G_LOGGER.verbosity(), ExitStack() as opened:
        sides = [
            ThreadedRunner(spec, opened.enter_context(spec.open(its, threads)), its)
            for spec, its in zip(specs, (manifest, *[other] * (len(specs) - 1)), strict=True)
        ]
        figures, firsts = _teacher_forced(sides, reference.ids[:steps].tolist(), tolerance, manifest, threads, say)
        free = [_free_run(side, start, tokens, say) for side in sides]
    return Comparison(
        bundle=str(bundle),
        against=None if against is None else str(against),
        reference=specs[0].name,
        text=f"{steps} tokens of {reference.origin}",
        prompt_tokens=len(start),
        tokens=tuple(free[0]),
        tolerance=tolerance,
        pairs=tuple(
            Pair(
                runner=spec.name,
                steps=tuple(rows),
                first=first,
                tokens=tuple(ids),
                parted=next((at for at, (mine, its) in enumerate(zip(free[0], ids, strict=True)) if mine != its), None),
            )
            for spec, rows, first, ids in zip(specs[1:], figures, firsts, free[1:], strict=True)
        ),
        machine=describe_machine(),
    )


def _teacher_forced(
    sides: list[ThreadedRunner], ids: list[int], tolerance: float, manifest: Manifest, threads: int | None, say: Progress
) -> tuple[list[list[Step]], list[FirstDifference | None]]:
    """Of each side but the first, the figures of each step, and where the first step that differs does."""
    steps: list[list[Step]] = [[] for _ in sides[1:]]
    firsts: list[FirstDifference | None] = [None for _ in sides[1:]]
    for position, token in enumerate(ids):
        feeds = [side.feeds(token) for side in sides]
        expected, *found = [side.step(token) for side in sides]
        for index, logits in enumerate(found):
            share = _shares({"logits": expected}, {"logits": logits})["logits"]
            agrees = bool((expected.argmax(axis=-1) == logits.argmax(axis=-1)).all())
            steps[index].append(Step(position, share * float(np.abs(expected).max()), share, agrees))
            if share > tolerance and firsts[index] is None:
                pair = (sides[0], sides[index + 1])
                firsts[index] = _locate(pair, (feeds[0], feeds[index + 1]), position, tolerance, manifest, threads)
        say("teacher-forced", position + 1, len(ids))
    return steps, firsts


def _free_run(side: ThreadedRunner, prompt: list[int], tokens: int, say: Progress) -> list[int]:
    side.reset()
    for token in prompt:
        logits = side.step(token)
    ids: list[int] = []
    for _ in range(tokens):
        ids.append(int(logits[0].argmax()))
        logits = side.step(ids[-1])
        say(f"free-running {side.spec.name}", len(ids), tokens)
    return ids


def _locate(
    pair: tuple[ThreadedRunner, ThreadedRunner],
    feeds: tuple[_Outputs, _Outputs],
    step: int,
    tolerance: float,
    manifest: Manifest,
    threads: int | None,
) -> FirstDifference:
    """Run the step again with what both graphs have inside as outputs."""
    one, other = pair
    models = one.spec.model(), other.spec.model()
    layers = manifest.model.layers
    states = {state.name: state.layer for state in manifest.states if state.layer is not None}
    marks = find_marks(*models, states, layers)
    if one.spec.is_engine or other.spec.is_engine:
        marks = last_of_each_layer(marks)
    names = [mark.first for mark in marks], [mark.second for mark in marks]
    with ExitStack() as opened:
        runners = [
            opened.enter_context(side.spec.open(side.manifest, threads, mark_outputs(model, wanted)))
            for side, model, wanted in zip(pair, models, names, strict=True)
        ]
        # First with the same states, so that only what this step itself does differently shows.
        theirs = {state.name: state.dtype for state in other.manifest.states}
        held = {state.name: from_host(feeds[0][state.name], state.dtype) for state in one.manifest.states}
        shared = feeds[1] | {name: to_host(held[name], dtype) for name, dtype in theirs.items()}
        for second in (shared, feeds[1]):
            left, right = infer(runners[0], feeds[0]), infer(runners[1], second)
            shares = _shares({mark.first: left[mark.first] for mark in marks}, {mark.first: right[mark.second] for mark in marks})
            for mark in marks:
                if shares[mark.first] > tolerance:
                    inside = 0 <= mark.layer < layers
                    place = f"layer {mark.layer}" if inside else "before the layers" if mark.layer < 0 else "after the layers"
                    return FirstDifference(step, mark.layer if inside else None, place, mark.node, mark.first, shares[mark.first])
    # Marking an output keeps a runtime from fusing across it.
    return FirstDifference(step, None, "nowhere, once each value is an output: a fusion differs", "", "", 0.0)


def _shares(expected: _Outputs, found: _Outputs) -> dict[str, float]:
    """Largest |difference| of each output, of the largest |expected|; infinite where a number is not finite or the shapes differ."""
    apart = SimpleCompareFunc(check_error_stat="max", fail_fast=False)
    wide = [{name: _numbers(array) for name, array in side.items()} for side in (expected, found)]
    result = apart(IterationResult(wide[0], runner_name="reference"), IterationResult(wide[1], runner_name="compared"))
    shares = {}
    for name, array in wide[0].items():
        largest = float(np.abs(array).max(initial=0.0))
        error = getattr(result[name], "max_absdiff", float("inf"))
        finite = np.isfinite(largest) and np.isfinite(error)
        shares[name] = error / (largest or 1.0) if finite else float("inf")
    return shares


def _numbers(array: NDArray[Any]) -> NDArray[np.float32]:
    """float32. No float output but bfloat16 is held in whole numbers."""
    return widen_bfloat16(array) if array.dtype == np.uint16 else np.asarray(array, np.float32)


def _specs(
    runners: Sequence[str], path: Path, manifest: Manifest, other_path: Path, other: Manifest, two_bundles: bool
) -> tuple[RunnerSpec, ...]:
    names = [name.strip() for name in runners]
    if two_bundles and len(names) == 1:
        names *= 2
    if len(names) < 2:
        raise InputError(f"runners={','.join(names)!r}: name two or more to compare, or another bundle (against)")
    if not two_bundles and len(set(names)) < len(names):
        raise InputError(f"runners={','.join(names)!r}: one is named twice; each is compared with the first")
    first = parse_runner(names[0], path, manifest)
    return (first, *(parse_runner(name, other_path, other) for name in names[1:]))


def _check_same_sizes(path: Path, manifest: Manifest, other_path: Path, other: Manifest) -> None:
    sizes = [
        ("vocabulary", manifest.model.vocab_size, other.model.vocab_size),
        ("rows", manifest.batch, other.batch),
        ("policy", manifest.policy, other.policy),
        ("caches", [(state.name, state.shape) for state in manifest.states], [(state.name, state.shape) for state in other.states]),
        ("rings", manifest.rings, other.rings),
    ]
    for what, one, two in sizes:
        if one != two:
            raise InputError(f"{path} and {other_path} differ in their {what}: {one}, {two}; export both alike")
