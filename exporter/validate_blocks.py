"""Validation of a bundle with weights of 4 or 8 bits: what the graphs compute, what int8 inputs cost, how far the model is.

1. The proof. The graphs run with their products in float32, everything else as it is in the file, against the oracle with the stored
   weights, under the tolerance of float32: layout, blocks, caches, windows, sinks and positions are right.
2. The file as it is, against the same oracle: what rounding the inputs of each product to int8 (accuracy level 4) costs.
3. The same figures against the model's own weights: what a user pays in all. Reported, and not judged.

In the form "rows" inputs are rounded to two digits of 8 bits, where others are rounded to one.

Graphs for engines (form "qdq") dequantize their weights and round no inputs: their proof is the file as it is, and 2. falls away.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sinkring.exporter.conformance.edited_copy import copy_bundle, edit_graph
from sinkring.exporter.divergence import Divergence, Region, Span
from sinkring.exporter.expected_logits import Expected
from sinkring.exporter.stored_weights import Moved, put_exact_products
from sinkring.exporter.verdict import MOST_BEYOND, MOST_MOVED, ROUNDED_KL, Run, Validation
from sinkring.runtime.manifest import Manifest

# (bundle, run, the logits to compare with) -> the run's figures.
Compare = Callable[[Path, Run, Expected], Divergence]


def validate_blocks(
    bundle: str,
    manifest: Manifest,
    runs: tuple[Run, ...],
    stored: Expected,
    original: Expected,
    judge: Callable[[str], Validation],
    compare: Compare,
) -> Validation:
    """stored: by the oracle with the bundle's weights; original: with the model's. judge: the validation of a folder against `stored`."""
    if manifest.weights.form == "qdq":
        return _validate_qdq(bundle, manifest, runs, stored, original, judge, compare)
    with tempfile.TemporaryDirectory(prefix="sinkring-") as scratch:
        exact = Path(scratch) / "exact"
        copy_bundle(Path(bundle), manifest, exact)
        for path in sorted({graph.path for graph in manifest.graphs}):
            edit_graph(exact, path, put_exact_products)
        proof = judge(str(exact))
    figures = _whole(bundle, runs, {"int8 inputs": stored, "against the fp32 model": original}, compare)
    rows = tuple(region for _, region in figures)
    judged = [region for title, region in figures if title == "int8 inputs"]
    return dataclasses.replace(
        proof,
        bundle=bundle,
        weights=manifest.weights.format,
        quantized=rows,
        failures=(*proof.failures, *_moved_too_far(manifest, stored.moved), *_rounded_too_far(judged)),
        notes=(
            *proof.notes,
            "the tolerance is that of the products in float32; the rows with int8 inputs are the file as it runs, "
            f"and pass with a mean KL of at most {ROUNDED_KL:g} nats",
            f"the stored weights are off from the model's by {_percent(stored.moved)}; "
            f"{len(manifest.weights.taken_over)} matrices are the source's own blocks",
        ),
    )


def _validate_qdq(
    bundle: str,
    manifest: Manifest,
    runs: tuple[Run, ...],
    stored: Expected,
    original: Expected,
    judge: Callable[[str], Validation],
    compare: Compare,
) -> Validation:
    proof = judge(bundle)
    rows = tuple(region for _, region in _whole(bundle, runs, {"against the model": original}, compare))
    return dataclasses.replace(
        proof,
        weights=manifest.weights.format,
        quantized=rows,
        failures=(*proof.failures, *_moved_too_far(manifest, stored.moved)),
        notes=(*proof.notes, f"the stored weights are off from the model's by {_percent(stored.moved)}"),
    )


def _whole(bundle: str, runs: tuple[Run, ...], against: dict[str, Expected], compare: Compare) -> list[tuple[str, Region]]:
    """(title, figures over all steps) of each run against each of the titled."""
    figures = []
    for run in runs:
        for title, expected in against.items():
            found = compare(Path(bundle), run, expected)
            whole = Span("all", 0, len(expected.logits))
            figures.append((title, found.region(f"{run.name}, {title}", whole, expected.margins, float("inf"))))
    return figures


def _percent(moved: dict[str, Moved]) -> str:
    worst = max(moved, key=lambda name: moved[name].distance, default=None)
    mean = np.mean([found.distance for found in moved.values()] or [0.0])
    return "nothing" if worst is None else f"{mean:.2%} on average, {moved[worst].distance:.2%} at most ({worst})"


def _moved_too_far(manifest: Manifest, moved: dict[str, Moved]) -> list[str]:
    lines, taken_over = [], set(manifest.weights.taken_over)
    for name, found in moved.items():
        distance = found.distance
        # A scale that is taken over is exact in float32 only.
        exact = name in taken_over and manifest.dtype == "float32"
        kind = "residuals taken over" if found.residuals else "taken over"
        limit = MOST_MOVED[kind if exact else manifest.weights.format]
        if not distance <= limit:
            said = "the source's blocks taken over explain" if name in taken_over else f"rounding to {manifest.weights.format} explains"
            lines.append(f"{name}: what is stored is {distance:.2g} of its norm off from the model's weight, more than {said} ({limit:g})")
        if found.beyond > MOST_BEYOND:
            lines.append(
                f"{name}: {found.beyond:.2%} of the stored weights are not the nearest to the model's on their grid, more than "
                f"{MOST_BEYOND:.2%}: scales or values are in another one's place"
            )
    return lines


def _rounded_too_far(regions: list[Region]) -> list[str]:
    return [
        f"{row.run}: mean KL {row.kl_mean:.3g} nats from the oracle with the same weights, more than {ROUNDED_KL:g}"
        for row in regions
        if not row.kl_mean <= ROUNDED_KL
    ]
