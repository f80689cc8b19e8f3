"""I2 and I3: at every step of a stream, past the ring's wraps, the logits are those of eager PyTorch under the bundle's policy."""

from sinkring.exporter.conformance.findings import Check, not_of_this_bundle
from sinkring.exporter.conformance.subject import Subject
from sinkring.exporter.unrounded import rounds_to_bfloat16
from sinkring.exporter.validate import judge_runs, plan_runs
from sinkring.exporter.validate_rounded import prove_unrounded
from sinkring.exporter.verdict import Validation
from sinkring.runtime.manifest import Manifest


def check_native(subject: Subject) -> Check:
    """Against eager attention over the whole sequence under an explicit mask."""
    return _check(subject, "I2", "native")


def check_streaming(subject: Subject) -> Check:
    """Against a literal StreamingLLM: keys kept un-rotated, rotated by cache index at each step."""
    return _check(subject, "I3", "streaming")


def _check(subject: Subject, invariant: str, policy: str) -> Check:
    if subject.manifest.policy != policy:
        return not_of_this_bundle(invariant, f"its policy is {subject.manifest.policy}")
    steps = len(subject.ids)
    runs, notes = plan_runs(subject.path, subject.manifest, None, steps)

    def judge(folder: str, manifest: Manifest) -> Validation:
        return judge_runs(folder, manifest, runs, notes, subject.reference, subject.expected, subject.say)

    # Eight bits hide a window that is off by one token: without their roundings the same graphs can be told from such ones.
    prove = prove_unrounded if rounds_to_bfloat16(subject.manifest) else lambda folder, manifest, by: by(folder, manifest)
    found = prove(str(subject.path), subject.manifest, judge)
    worst = max(row.max_error for row in found.regions)
    agreement = min(row.top1 for row in found.regions)
    controls = "; ".join(f"control {control.name}: {control.max_error:.2e} away" for control in found.controls)
    good = f"the best token agrees in {agreement:.2%} of the steps or more; {controls}"
    return Check(
        invariant,
        f"{steps} steps, {', '.join(row.region for row in found.regions[: len(found.regions) // len(runs)])}, "
        f"in {len(runs)} runs: {', '.join(run.name for run in runs)}",
        "max |Δlogit| to the oracle",
        worst,
        found.tolerance,
        found.passed,
        "; ".join(found.failures) if found.failures else "; ".join([good, *notes]),
    )
