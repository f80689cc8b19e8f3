"""`sinkring compare`, for people: the steps of each runner against the reference, and where the first difference lies."""

from typing import TYPE_CHECKING

from sinkring.exporter.cli_output import print_facts, print_table

if TYPE_CHECKING:
    from sinkring.exporter.compare import Comparison, Pair

_MOST_ROWS = 16


def print_comparison(found: "Comparison") -> None:
    reference = found.reference if found.against is None else f"{found.reference} on {found.bundle}"
    print_facts(
        {
            "reference": reference,
            **({} if found.against is None else {"compared": found.against}),
            "text": f"{found.text}, one at a time",
            "tolerance": f"{found.tolerance:.2g} of max |logit|",
            "measured on": f"{found.machine.cpu}, {found.machine.cores} cores",
        },
        title=found.bundle,
    )
    for pair in found.pairs:
        print()
        print_table(
            ("steps", "worst |Δlogit|", "of max |logit|", "top-1 agreement", "first differing layer", "node"),
            _rows(pair),
            title=f"{pair.runner} against {found.reference}",
        )
        if pair.first is not None and pair.first.node:
            print(f"{pair.first.value} is {pair.first.share:.2e} of its largest number apart at step {pair.first.step}")
        print(_free_run(found, pair))
    print("passed" if found.passed else "failed: logits differ by more than the tolerance")


def _rows(pair: "Pair") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    size = -(-len(pair.steps) // _MOST_ROWS)
    for start in range(0, len(pair.steps), size):
        steps = pair.steps[start : start + size]
        worst = max(steps, key=lambda step: step.share)
        span = f"{steps[0].position}..{steps[-1].position}" if len(steps) > 1 else str(steps[0].position)
        agreed = sum(step.agrees for step in steps) / len(steps)
        here = pair.first is not None and steps[0].position <= pair.first.step <= steps[-1].position
        place = (pair.first.place, pair.first.node) if here and pair.first is not None else ("none", "") if pair.first is None else ("", "")
        rows.append((span, f"{worst.error:.2e}", f"{worst.share:.2e}", f"{agreed:.1%}", *place))
    return rows


def _free_run(found: "Comparison", pair: "Pair") -> str:
    what = f"free-running, {len(found.tokens)} tokens from a prompt of {found.prompt_tokens}"
    if pair.parted is None:
        return f"{what}: the same"
    return f"{what}: token {pair.parted} is the first that differs, {pair.tokens[pair.parted]} in place of {found.tokens[pair.parted]}"
