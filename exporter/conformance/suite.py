"""check_conformance: the invariants I1 to I12 against one bundle, on the machine it is to run on."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from sinkring.exporter.conformance.age import check_age
from sinkring.exporter.conformance.agreement import check_agreement
from sinkring.exporter.conformance.chunks import check_chunks
from sinkring.exporter.conformance.edited_copy import copy_bundle
from sinkring.exporter.conformance.everything_counts import check_everything
from sinkring.exporter.conformance.findings import TITLES, Check, Conformance
from sinkring.exporter.conformance.growth import check_growth
from sinkring.exporter.conformance.policies import check_native, check_streaming
from sinkring.exporter.conformance.refusals import check_refusals
from sinkring.exporter.conformance.resets import check_resets
from sinkring.exporter.conformance.rollback import check_rollback
from sinkring.exporter.conformance.rows import check_rows
from sinkring.exporter.conformance.saboteurs import Saboteur, find_saboteur
from sinkring.exporter.conformance.snapshots import check_snapshots
from sinkring.exporter.conformance.subject import Subject
from sinkring.exporter.expected_logits import Progress, compute_expected
from sinkring.exporter.geometries import leading_geometry, most_tokens
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.exporter.validate import PACKAGES
from sinkring.exporter.verdict import find_limits
from sinkring.runtime.bundle import check_consistent, check_files
from sinkring.runtime.errors import InputError, UnsupportedError
from sinkring.runtime.manifest import Manifest

SUITES = ("quick", "full")
BUDGET_S = 900.0
# Tokens that the oracle takes about half a minute for on two cores with SmolLM2: the quick suite goes past the second wrap if that is
# enough for it, and past the first one in any case.
QUICK_TOKENS = 320

CHECKS: dict[str, Callable[[Subject], Check]] = {
    "I1": check_chunks,
    "I2": check_native,
    "I3": check_streaming,
    "I4": check_rows,
    "I5": check_resets,
    "I6": check_snapshots,
    "I7": check_rollback,
    "I8": check_growth,
    "I9": check_age,
    "I10": check_everything,
    "I11": check_refusals,
    "I12": check_agreement,
}


def check_conformance(
    bundle: str | Path,
    suite: str = "quick",
    *,
    backend: str = "onnxruntime",
    model: str | None = None,
    only: Iterable[str] | None = None,
    budget_s: float = BUDGET_S,
    sabotage: str | None = None,
    progress: Progress | None = None,
) -> Conformance:
    """Check every invariant against the bundle: one row each, also of a bundle that breaks them.

    suite: "quick" or "full" (longer text, every weight, 100,000 steps or as many as fit into budget_s seconds, processes killed while they
    write). model: where the bundle's model is now, default as the manifest names it. only: the invariants to check, default all.
    sabotage: the name of a saboteur that breaks the bundle's copy or the runtime first. progress is called with a stage, how much of it is
    done, and out of how much.

    Raises InputError for a suite, invariant or saboteur that is not known, BundleError for a bundle that is damaged or whose model is
    missing or another one, UnsupportedError, DependencyError.
    """
    path = Path(bundle)
    full, chosen = _check_choices(suite, only, budget_s)
    manifest = Manifest.read(path)
    check_files(path, manifest)
    check_consistent(path, manifest)
    stored = manifest.weights.format != "fp32"
    if stored and manifest.weights.form != "qdq":
        raise UnsupportedError(
            f"{path}: has weights in {manifest.weights.format} for ONNX Runtime, whose products round their inputs; leave --suite out, or "
            "check an fp32 export of the same model and geometry, whose graphs differ in nothing but their products"
        )
    limits = find_limits(path, manifest)
    saboteur = None if sabotage is None else _find_fit(sabotage, path, manifest, full)
    say: Progress = progress or (lambda stage, done, total: None)
    began = time.perf_counter()
    tokens = _tokens(manifest, full)
    reference = read_reference_ids(path, manifest, tokens)
    expected = compute_expected(str(bundle), manifest, reference.ids, model, say, stored=stored)
    with tempfile.TemporaryDirectory(prefix="sinkring-") as scratch:
        subject = Subject(
            path=path,
            manifest=manifest,
            full=full,
            backend=backend,
            reference=reference,
            expected=expected,
            tolerance=limits.relative * expected.scale,
            scratch=Path(scratch),
            budget_s=budget_s,
            say=say,
            sabotage=sabotage,
        )
        # A backend that this machine lacks is the user's to mend, and no finding.
        subject.open().close()
        checks = tuple(_run(invariant, subject, saboteur) for invariant in chosen)
    return Conformance(
        bundle=str(bundle),
        model=expected.source,
        suite=suite,
        backend=backend,
        policy=manifest.policy,
        dtype=manifest.dtype,
        cache_dtype=manifest.cache_dtype,
        batch=manifest.batch,
        chunk=manifest.chunk,
        rings=manifest.rings,
        ids=reference.origin,
        tokens=tokens,
        scale=expected.scale,
        tolerance=subject.tolerance,
        sabotage=sabotage,
        checks=checks,
        seconds=round(time.perf_counter() - began, 1),
        versions={package: version(package) for package in PACKAGES},
        machine=describe_machine(),
    )


def _check_choices(suite: str, only: Iterable[str] | None, budget_s: float) -> tuple[bool, list[str]]:
    if suite not in SUITES:
        raise InputError(f"suite {suite!r} is not known; use one of {', '.join(SUITES)}")
    if not budget_s > 0:
        raise InputError(f"budget_s={budget_s!r}: must be more than 0 seconds")
    chosen = list(CHECKS) if only is None else list(only)
    if unknown := [name for name in chosen if name not in CHECKS]:
        raise InputError(f"invariant {unknown[0]!r} is not known; use one of {', '.join(CHECKS)}")
    return suite == "full", chosen


def _find_fit(name: str, bundle: Path, manifest: Manifest, full: bool) -> Saboteur:
    saboteur = find_saboteur(name)
    if why := saboteur.unfit(bundle, manifest, full):
        raise InputError(why)
    return saboteur


def _tokens(manifest: Manifest, full: bool) -> int:
    """Of the text: past the third wrap and at least five windows in the full suite, as far as a linear cache lets it go."""
    geometry, most = leading_geometry(manifest), most_tokens(manifest)
    if not geometry.wraps:
        wanted = geometry.window_tokens if full else QUICK_TOKENS
    elif full:
        wanted = max(5 * geometry.window_tokens, geometry.capacity + 2 * geometry.slots + 32)
    else:
        second_wrap = geometry.capacity + geometry.slots + 32
        wanted = second_wrap if second_wrap <= QUICK_TOKENS else geometry.capacity + 40
    return wanted if most is None else min(wanted, most)


def _run(invariant: str, subject: Subject, saboteur: Saboteur | None) -> Check:
    """A check that ends in an error has failed: a broken runtime may fail in ways of its own."""
    scratch = subject.scratch / invariant
    scratch.mkdir()
    subject = dataclasses.replace(subject, scratch=scratch)
    if saboteur is not None and saboteur.edit is not None:
        copy = scratch / "sabotaged"
        copy_bundle(subject.path, subject.manifest, copy)
        saboteur.edit(copy, subject.manifest)
        subject = dataclasses.replace(subject, path=copy)
    subject.say(f"{invariant}: {TITLES[invariant]}", 0, 1)
    try:
        with nullcontext() if saboteur is None else saboteur.at_work():
            return CHECKS[invariant](subject)
    except Exception as error:
        what = f"ended in {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Check(invariant, "the check did not come to its end", "", float("inf"), None, False, what)
    finally:
        subject.say(f"{invariant}: {TITLES[invariant]}", 1, 1)
