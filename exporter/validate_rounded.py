"""Validation of a bundle that computes or keeps its caches in bfloat16: what its graphs compute, what eight bits cost, and in all.

1. The proof. The bundle's graphs with no rounding to bfloat16 (see `unrounded`), against the oracle with the rounded weights, under the
   tolerance of the types that are left: layout, caches, windows, sinks and positions are right.
2. The file as it is, against the same oracle, under a tolerance for its largest and its mean error; no further off on average than eager
   PyTorch is in bfloat16, beyond a quarter; and no further off when old than when young.
3. The same figures against the model's own weights in float32. Reported, and not judged.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.divergence import Divergence, Region, Span, age_spans
from sinkring.exporter.expected_logits import Expected, Wrong
from sinkring.exporter.geometries import leading_geometry
from sinkring.exporter.unrounded import copy_unrounded
from sinkring.exporter.verdict import EAGER_SHARE, MOST_PAST, Growth, Run, Validation, find_limits, grown_lines, measure_growth
from sinkring.runtime.manifest import Manifest

# (bundle, its manifest) -> its validation against the oracle with rounded weights.
Judge = Callable[[str, Manifest], Validation]
# (bundle, run, the logits to compare with) -> the run's figures against the right ones, and against each of the others by name.
Compare = Callable[[Path, Run, Expected], tuple[Divergence, dict[str, Divergence]]]
_ORIGINAL = "against the fp32 model"


def validate_rounded(
    bundle: str,
    manifest: Manifest,
    runs: tuple[Run, ...],
    rounded: Expected,
    original: Expected,
    eager: NDArray[np.float32] | None,
    judge: Judge,
    compare: Compare,
) -> Validation:
    """rounded: by the oracle with the bundle's weights; original: with the model's. eager: logits [N,V] of eager PyTorch in bfloat16, of a
    bundle that computes in it."""
    proof = prove_unrounded(bundle, manifest, judge)
    limits, spans = find_limits(Path(bundle), manifest), age_spans(leading_geometry(manifest), len(rounded.logits))
    assert limits.mean is not None, "what is rounded this far has a limit for its mean error"
    both = dataclasses.replace(rounded, wrong=(Wrong(_ORIGINAL, 0, original.logits),))
    whole = Span("all", 0, len(rounded.logits))
    most, mean = limits.relative * rounded.scale, limits.mean * rounded.scale
    eager_mean = None if eager is None else _mean_error(eager, rounded)
    rows: list[Region] = []
    failures: list[str] = []
    ages: list[Growth] = []
    for run in runs:
        name = f"{run.name}, as it runs"
        found, others = compare(Path(bundle), run, both)
        rows += [found.region(name, span, rounded.margins, most) for span in spans]
        past = float((found.max_error > most).mean())
        failures += _too_far(found.region(name, whole, rounded.margins, most), past, most, mean, eager_mean)
        growth = measure_growth(name, found, spans, most)
        ages += [growth] if growth else []
        rows.append(others[_ORIGINAL].region(f"{run.name}, {_ORIGINAL}", whole, original.margins, most))
    return dataclasses.replace(
        proof,
        growth=(*proof.growth, *ages),
        quantized=tuple(rows),
        failures=(*proof.failures, *failures, *grown_lines(tuple(ages))),
        notes=(*proof.notes, *_notes(limits.relative, limits.mean, eager_mean, rounded.scale)),
    )


def prove_unrounded(bundle: str, manifest: Manifest, judge: Judge) -> Validation:
    """The validation of the bundle's graphs without rounding to bfloat16, under the bundle's own name and types."""
    with tempfile.TemporaryDirectory(prefix="sinkring-") as scratch:
        exact = Path(scratch) / "exact"
        proof = judge(str(exact), copy_unrounded(Path(bundle), manifest, exact))
    return dataclasses.replace(proof, bundle=bundle, dtype=manifest.dtype, cache_dtype=manifest.cache_dtype)


def _mean_error(logits: NDArray[np.float32], expected: Expected) -> float:
    found = Divergence(expected.logits)
    found.add(0, logits)
    return float(found.mean_error.mean())


def _too_far(row: Region, past: float, most: float, mean: float, eager: float | None) -> list[str]:
    """past: the share of steps whose largest error is more than `most`."""
    if row.non_finite_steps:
        return [f"{row.run}: {row.non_finite_steps} of {row.steps} steps have logits that are NaN or infinite"]
    lines = []
    if past > MOST_PAST:
        lines.append(f"{row.run}: max error {row.max_error:.3g}, and {past:.1%} of the steps are past the tolerance {most:.3g}")
    if row.mean_error > mean:
        lines.append(f"{row.run}: mean error {row.mean_error:.3g}, tolerance {mean:.3g}")
    if eager is not None and row.mean_error > EAGER_SHARE * eager:
        lines.append(
            f"{row.run}: mean error {row.mean_error:.3g}, eager PyTorch's in the same dtype is {eager:.3g}: at most {EAGER_SHARE:g} times "
            "that is rounding"
        )
    return lines


def _notes(relative: float, mean: float, eager: float | None, scale: float) -> list[str]:
    said = [
        "the tolerance is that of the graphs without rounding to bfloat16; the rows as it runs are the file, and pass with a mean error of "
        f"{mean * scale:.3g} ({mean:g} of the largest logit) and a max one of {relative * scale:.3g} ({relative:g} of it) in all but "
        f"{MOST_PAST:.0%} of the steps"
    ]
    if eager is not None:
        said.append(f"eager PyTorch in bfloat16 has a mean error of {eager:.3g}, and the file may have {EAGER_SHARE:g} times as much")
    return said
