"""A bundle's weights, for people: how they are stored, and for `sinkring compare-weights` quality and bytes of two bundles side by side."""

from typing import TYPE_CHECKING

from sinkring.exporter.cli_output import print_facts, print_table

if TYPE_CHECKING:
    from sinkring.exporter.compare_weights import WeightComparison
    from sinkring.runtime.manifest import Manifest


def describe_weights(manifest: "Manifest") -> str:
    stored = manifest.weights
    said = f"{manifest.model.weight_bytes:,} bytes, {manifest.dtype if stored.format == 'fp32' else stored.format}"
    if stored.taken_over:
        said += f", {len(stored.taken_over)} matrices taken over from the source as they are"
    return said + (f", {len(stored.kept_fp32)} kept in fp32" if stored.kept_fp32 else "")


def print_weight_comparison(found: "WeightComparison") -> None:
    machine = found.machine
    print_facts(
        {
            "text": f"{found.tokens:,} tokens of {found.text}",
            "measured on": f"{machine.cpu}, {machine.cores} cores; "
            + ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
        },
        title="weights",
    )
    print()
    reference = found.reference
    print_table(
        ("bundle", "weights", "bytes", "share", "perplexity", "ratio", "mean KL, nats", "top-1 agreement"),
        [
            (
                side.bundle,
                side.weights,
                f"{side.weight_bytes:,}",
                f"{side.weight_bytes / reference.weight_bytes:.1%}",
                f"{side.perplexity:.3f}",
                f"{side.perplexity / reference.perplexity:.4f}",
                f"{side.kl:.2e}",
                f"{side.top1:.2%}",
            )
            for side in (reference, found.compared)
        ],
    )
