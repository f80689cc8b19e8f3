"""validate_bundle: does a bundle compute what its model computes, at every step and at every age of a stream?

The oracle runs in eager PyTorch; the bundle runs in ONNX Runtime, with the very files that engines are built from. Every graph of every
target is run: the decode graphs token by token, the prefill graphs in chunks of mixed lengths that end and begin anywhere in the ring.
"""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.divergence import Divergence, age_spans
from sinkring.exporter.expected_logits import Expected, Progress, compute_eager, compute_expected
from sinkring.exporter.geometries import leading_geometry, most_tokens
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.reference_text import ReferenceIds, read_reference_ids
from sinkring.exporter.unrounded import rounds_to_bfloat16
from sinkring.exporter.validate_blocks import validate_blocks
from sinkring.exporter.validate_rounded import prove_unrounded, validate_rounded
from sinkring.exporter.verdict import Run, Validation, find_failures, find_limits, judge_control, measure_growth
from sinkring.runtime.bfloat16 import BFLOAT16
from sinkring.runtime.bundle import check_consistent, check_files
from sinkring.runtime.decoder import Decoder, open_bundle
from sinkring.runtime.errors import BundleError, InputError
from sinkring.runtime.manifest import Manifest

PACKAGES = ("sinkring", "onnxruntime", "torch", "transformers", "numpy")

Logits = NDArray[np.float32]


def validate_bundle(
    bundle: str | Path, steps: int = 1024, *, model: str | None = None, target: str | None = None, progress: Progress | None = None
) -> Validation:
    """Run `steps` tokens of real text through the bundle and through the oracle, and compare the logits of every step.

    model: where the bundle's model is now, default as the manifest names it; its sha256 must be the manifest's. target: only the graphs of
    this target. progress is called with a stage, how much of it is done, and out of how much.

    Returns a Validation, also for a bundle that is wrong: see `passed` and `failures`.
    Raises BundleError for a bundle that is damaged or whose model is missing or another one, InputError for steps below 1 or more than the
    text has, UnsupportedError, DependencyError. Of a linear cache at most its capacity is run.
    """
    path = Path(bundle)
    if steps < 1:
        raise InputError(f"steps={steps}: must be 1 or more")
    manifest = Manifest.read(path)
    # Before the oracle's minutes, not after.
    check_files(path, manifest)
    check_consistent(path, manifest)
    find_limits(path, manifest)
    most = most_tokens(manifest)
    cut = [f"steps={steps} are more than the capacity: {most} were run"] if most is not None and steps > most else []
    steps = steps if most is None else min(steps, most)
    runs, notes = plan_runs(path, manifest, target, steps)
    notes += cut
    reference = read_reference_ids(path, manifest, steps)
    say: Progress = progress or (lambda stage, done, total: None)
    stored = manifest.weights.format != "fp32"
    expected = compute_expected(str(bundle), manifest, reference.ids, model, say, stored=stored)

    def judge(folder: str, made: Manifest) -> Validation:
        return judge_runs(folder, made, runs, notes, reference, expected, say)

    if rounds_to_bfloat16(manifest) and not stored:
        return validate_rounded(
            str(bundle),
            manifest,
            runs,
            expected,
            compute_expected(str(bundle), manifest, reference.ids, model, say, rounded=False),
            compute_eager(str(bundle), manifest, reference.ids, model, say) if manifest.dtype == BFLOAT16 else None,
            judge,
            lambda folder, run, right: _compare(folder, run, manifest, reference.ids, right, say),
        )
    if not stored:
        return judge(str(bundle), manifest)
    return validate_blocks(
        str(bundle),
        manifest,
        runs,
        expected,
        compute_expected(str(bundle), manifest, reference.ids, model, say),
        lambda folder: prove_unrounded(folder, manifest, judge) if rounds_to_bfloat16(manifest) else judge(folder, manifest),
        lambda folder, run, right: _compare(folder, run, manifest, reference.ids, right, say)[0],
    )


def judge_runs(
    bundle: str,
    manifest: Manifest,
    runs: tuple[Run, ...],
    notes: list[str],
    reference: ReferenceIds,
    expected: Expected,
    say: Progress,
) -> Validation:
    """Run the bundle over the ids that `expected` was computed for, and judge. `manifest` is what it must be."""
    path, steps, geometry = Path(bundle), len(reference.ids), leading_geometry(manifest)
    notes = list(notes)
    limits = find_limits(path, manifest)
    tolerance = limits.relative * expected.scale
    spans = age_spans(geometry, steps)
    if geometry.wraps and len(spans) < 3:
        notes.append(f"steps={steps} do not reach the second wrap of the ring, at position {geometry.capacity + geometry.slots}")
    if not expected.wrong:
        notes.append(f"steps={steps} do not reach past sinks + window: nothing leaves the window, so the window is not tested")
    elif expected.trained_window is not None and steps <= expected.trained_window:
        notes.append(f"steps={steps} do not reach past the trained window of {expected.trained_window} tokens, so that one is not tested")

    regions, growth = [], []
    controls: dict[str, dict[str, Divergence]] = {wrong.name: {} for wrong in expected.wrong}
    for run in runs:
        right, wrongs = _compare(path, run, manifest, reference.ids, expected, say)
        regions += [right.region(run.name, span, expected.margins, tolerance) for span in spans]
        growth.append(measure_growth(run.name, right, spans, tolerance))
        for name, figures in wrongs.items():
            controls[name][run.name] = figures

    rows, ages = tuple(regions), tuple(found for found in growth if found)
    needed = limits.control_needed(tolerance, max(row.max_error for row in rows))
    judged = tuple(judge_control(name, measured, needed) for name, measured in controls.items())
    return Validation(
        bundle=bundle,
        model=expected.source,
        model_sha256=manifest.model.source_sha256,
        policy=manifest.policy,
        dtype=manifest.dtype,
        cache_dtype=manifest.cache_dtype,
        rings=manifest.rings,
        batch=manifest.batch,
        chunk=manifest.chunk,
        steps=steps,
        ids=reference.origin,
        ids_sha256=hashlib.sha256(reference.ids.astype("<i8").tobytes()).hexdigest(),
        scale=expected.scale,
        tolerance=tolerance,
        runs=runs,
        regions=rows,
        growth=ages,
        controls=judged,
        failures=find_failures(rows, ages, judged, tolerance, expected.scale),
        notes=tuple(notes),
        versions={package: version(package) for package in PACKAGES},
        made_with=manifest.made_with,
        machine=describe_machine(),
    )


def plan_runs(path: Path, manifest: Manifest, target: str | None, steps: int) -> tuple[tuple[Run, ...], list[str]]:
    """Each distinct decode graph once, and each distinct pair of graphs once in chunks; and notes on what is left out."""
    targets = [target] if target else sorted({graph.target for graph in manifest.graphs})
    if not targets:
        raise BundleError(f"{path}: its manifest lists no graphs; export again")
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    # One token at a time goes to the decode graph, so chunks of one would not run prefill at all.
    with_chunks = steps > 1 and manifest.chunk > 1
    for name in targets:
        decode, prefill = manifest.graph("decode", name).cpu_path, manifest.graph("prefill", name).cpu_path
        shared.setdefault(("decode", (decode,)), []).append(name)
        if with_chunks:
            shared.setdefault(("chunks", (prefill, decode)), []).append(name)
    runs = tuple(Run(kind, tuple(names), graphs) for (kind, graphs), names in shared.items())
    notes = [] if with_chunks else [f"the prefill graph was not run: steps={steps}, chunk={manifest.chunk}, both must be 2 or more"]
    return runs, notes


def _compare(
    path: Path, run: Run, manifest: Manifest, ids: NDArray[np.int64], expected: Expected, progress: Progress
) -> tuple[Divergence, dict[str, Divergence]]:
    """The run against the oracle, and against each wrong one by name. The run's logits are dropped call by call."""
    right = Divergence(expected.logits)
    wrongs = {wrong.name: Divergence(wrong.logits, wrong.first) for wrong in expected.wrong}
    progress(run.name, 0, len(ids))
    # The hashes were checked once, before the oracle.
    # In chunks as the runtime runs them; by steps each decode graph itself, also where the runtime decodes with the prefill graph.
    options: dict[str, Any] = {"one_session": False} if run.kind == "decode" else {}
    with open_bundle(path, target=run.targets[0], verify=False, alarms=False, **options) as decoder:
        calls = _decode_calls(decoder, manifest, ids) if run.kind == "decode" else _chunk_calls(decoder, manifest, ids)
        for position, logits in calls:
            for divergence in (right, *wrongs.values()):
                divergence.add(position, logits)
            progress(run.name, position + len(logits), len(ids))
    return right, wrongs


def _decode_calls(decoder: Decoder, manifest: Manifest, ids: NDArray[np.int64]) -> Iterator[tuple[int, Logits]]:
    """(position, logits [1,V]) of each token. Rows of a batch take the same token; each step shows another of them."""
    if decoder.manifest.batch == 1:
        with decoder.stream() as stream:
            for position in range(len(ids)):
                yield position, stream.feed(ids[position : position + 1], all_logits=True)
        return
    # A stream of a larger batch sends its tokens to prefill, so here the decode graph is called itself.
    backend = decoder.backend
    for row in range(decoder.manifest.batch):
        backend.reset_row(row)
    for position, token in enumerate(ids):
        for row in range(decoder.manifest.batch):
            decoder.place_token(row, int(token))
        backend.position[:] = position
        for index, ring in zip(backend.write_index, manifest.rings, strict=True):
            index[:] = ring.geometry.slot(position)
        backend.decode()
        yield position, backend.logits[position % decoder.manifest.batch]


def _chunk_calls(decoder: Decoder, manifest: Manifest, ids: NDArray[np.int64]) -> Iterator[tuple[int, Logits]]:
    """(position, logits [T,V]) of pieces of mixed lengths, single tokens and more than a chunk among them."""
    chunk, windows = manifest.chunk, sorted({ring.geometry.window_tokens for ring in manifest.rings})
    longest = 2 * chunk + 1
    position = 0
    with decoder.stream() as stream:
        around = [min(length, longest) for window in windows for length in (window + 1, window)]
        for length in cycle((chunk, 1, 2, chunk - 1, 3, longest, 1, *around)):
            if position >= len(ids):
                return
            piece = ids[position : position + length]
            yield position, stream.feed(piece, all_logits=True)
            position += len(piece)
