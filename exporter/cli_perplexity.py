"""`sinkring perplexity`, for people: the policies side by side."""

from typing import TYPE_CHECKING

from sinkring.exporter.cli_output import print_facts, print_table

if TYPE_CHECKING:
    from sinkring.exporter.perplexity import Perplexity


def print_perplexity(found: "Perplexity") -> None:
    machine = found.machine
    print_facts(
        {
            "text": f"{found.text}, {len(found.start_positions)} starts of {found.tokens:,} tokens",
            "cache": f"S={found.sinks} W={found.window}, full from position {found.first_scored:,} on, from where the means are taken",
            "measured on": f"{machine.cpu}, {machine.cores} cores; "
            + ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
        },
        title=found.model,
    )
    print()
    reference = found.reference
    rows = []
    for policy in found.losses:
        own, other = found.estimate(policy), found.compare(policy, reference)
        rows.append(
            (policy, f"{own.nats:.4f} ± {own.standard_error:.4f}", f"{own.factor:.2f}", f"{other.factor:.4f} ± {other.factor_error:.4f}")
        )
    print_table(("policy", "log-perplexity, nats", "perplexity", f"perplexity / that of {reference}"), rows)
