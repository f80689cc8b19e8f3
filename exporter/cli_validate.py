"""`sinkring validate`, for people: the figures by the age of the stream, and what failed."""

from typing import TYPE_CHECKING

from sinkring.exporter.cli_output import print_facts, print_table
from sinkring.exporter.geometries import describe_rings

if TYPE_CHECKING:
    from sinkring.exporter.verdict import Validation


def print_validation(found: "Validation") -> None:
    machine = found.machine
    print_facts(
        {
            "against": f"{found.model}, eager PyTorch over the whole sequence",
            "policy": found.policy,
            "rings": f"{describe_rings(found.rings)}, B={found.batch}",
            "dtype": f"{found.dtype}, caches {found.cache_dtype}",
            **({"weights": found.weights} if found.weights != "fp32" else {}),
            "text": f"{found.steps:,} tokens of {found.ids}",
            "tolerance": f"{found.tolerance:.3g} on logits of up to {found.scale:.3g}",
            "measured on": f"{machine.cpu}, {machine.cores} cores; "
            + ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
        },
        title=found.bundle,
    )
    print()
    print_table(
        ("run", "region", "positions", "max |Δlogit|", "mean |Δlogit|", "max KL", "mean KL", "top-1 agreement", "first divergence"),
        [
            (
                row.run,
                row.region,
                f"{row.start}..{row.stop - 1}",
                f"{row.max_error:.2e}",
                f"{row.mean_error:.2e}",
                f"{row.kl_max:.2e}",
                f"{row.kl_mean:.2e}",
                f"{row.top1:.2%}",
                "none" if row.first_divergence is None else f"position {row.first_divergence}",
            )
            for row in (*found.regions, *found.quantized)
        ],
    )
    for control in found.controls:
        verdict = "told apart" if control.told_apart else "not told apart"
        print(f"control {control.name}: {verdict}, {control.max_error:.2e} away where {control.needed:.2e} is needed")
    for line in found.notes:
        print(f"note: {line}")
    for line in found.failures:
        print(f"failed: {line}")
    print("passed" if found.passed else f"failed: {len(found.failures)} faults")
