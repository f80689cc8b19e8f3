"""`sinkring bench`, for people: one column for each bundle, and the memory bandwidth that bounds them."""

from pathlib import Path
from typing import TYPE_CHECKING

from sinkring.exporter.cli_output import print_facts, print_table

if TYPE_CHECKING:
    from sinkring.exporter.bench.measure import Bench, BundleCost


def print_bench(found: "Bench") -> None:
    machine = found.machine
    facts = {
        "measured on": f"{machine.cpu}, {machine.cores} cores, {found.threads} threads; {found.backend} on {found.device}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
        "in turns": f"{found.rounds} rounds of {found.steps} steps at each position; medians, with the middle half in brackets",
    }
    if found.bandwidth is not None:
        rate = found.bandwidth
        facts["memory bandwidth"] = f"{rate.median / 1e9:.1f} GB/s ({rate.p25 / 1e9:.1f} .. {rate.p75 / 1e9:.1f})"
    facts["process before"] = f"{found.process_bytes / 1e6:,.0f} MB resident"
    print_facts(facts)
    print()
    columns = [_column(cost, found.bundles[0]) for cost in found.bundles]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    print_table(("", *(Path(cost.bundle).name for cost in found.bundles)), rows)


def _column(cost: "BundleCost", first: "BundleCost") -> dict[str, str]:
    column = {
        "bundle": f"{cost.weights}, B={cost.batch}, S={cost.sinks_tokens} W={cost.window_tokens} C={cost.capacity_slots}",
        "opened in": f"{cost.open_seconds:.2f} s",
    }
    for position, spread in cost.step_ms.items():
        ratio = spread.median / cost.step_ms[cost.full_position].median
        column[_place(cost, position)] = f"{spread} ms, {ratio:.3f} of a full ring's"
    full = cost.step_ms[cost.full_position]
    column["p99, back to back"] = f"{full.p99:.4g} ms"
    column["paced, one in 80 ms"] = f"{cost.paced_ms} ms, p99 {cost.paced_ms.p99:.4g} ms"
    column["read by a step"] = (
        f"{cost.read_bytes / 1e6:,.1f} MB: weights {cost.weight_read_bytes / 1e6:,.1f}, cache {cost.cache_bytes / 1e6:,.1f}"
    )
    if cost.floor_ms is not None and cost.bandwidth_share is not None:
        column["that alone takes"] = f"{cost.floor_ms} ms, {cost.bandwidth_share.median:.0%} of a step"
    column["tokens/s, all rows"] = f"{cost.tokens_per_second:,.1f}, {cost.tokens_per_second / first.tokens_per_second:.2f} of the first's"
    column["host work a step"] = ", ".join(f"{name} {cost.host_ms[name]:.3f} ms, {share:.1%}" for name, share in cost.host_share.items())
    column["prompt"] = (
        f"{cost.prompt_tokens:,} tokens: {cost.prefill_tokens_per_second} tokens/s, first token after {cost.first_token_ms} ms"
    )
    column["resident, added"] = f"{cost.resident_bytes / 1e6:,.0f} MB"
    return column


def _place(cost: "BundleCost", position: int) -> str:
    return f"step at {position:,}" + (", full" if position == cost.full_position else "")
