"""`sinkring validate --suite`, for people: one row per invariant, and what failed."""

from typing import TYPE_CHECKING

from sinkring.exporter.cli_output import print_facts, print_table
from sinkring.exporter.geometries import describe_rings

if TYPE_CHECKING:
    from sinkring.exporter.conformance.findings import Check, Conformance


def print_conformance(found: "Conformance") -> None:
    machine = found.machine
    print_facts(
        {
            "suite": f"{found.suite}, {found.seconds:,.0f} s",
            "against": f"{found.model}, eager PyTorch over the whole sequence",
            "policy": found.policy,
            "rings": f"{describe_rings(found.rings)}, B={found.batch}",
            "dtype": f"{found.dtype}, caches {found.cache_dtype}",
            "text": f"{found.tokens:,} tokens of {found.ids}, logits up to {found.scale:.3g}",
            "measured on": f"{machine.cpu}, {machine.cores} cores, {found.backend}; "
            + ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
            **({"sabotaged by": found.sabotage} if found.sabotage else {}),
        },
        title=found.bundle,
    )
    print()
    print_table(
        ("", "invariant", "worst", "tolerance", "of", "passed"),
        [(row.invariant, row.title, _figure(row.worst), _figure(row.tolerance), row.measure, _verdict(row)) for row in found.checks],
    )
    for row in found.checks:
        print(f"{row.invariant} tried: {row.tried}")
        if row.detail and row.passed is not False:
            print(f"{row.invariant} found: {row.detail}")
    for row in found.checks:
        if row.passed is False:
            print(f"failed: {row.invariant}, {row.title}: {row.detail}")
    broken = sum(row.passed is False for row in found.checks)
    print("passed" if found.passed else f"failed: {broken} of {len(found.checks)} invariants")


def print_saboteurs() -> None:
    """What `--sabotage` can break."""
    from sinkring.exporter.conformance.saboteurs import SABOTEURS

    print_table(
        ("name", "what it breaks", "which invariant notices"), [(row.name, row.breaks, " or ".join(row.invariants)) for row in SABOTEURS]
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _verdict(row: "Check") -> str:
    return {True: "yes", False: "NO", None: "not of this bundle"}[row.passed]
