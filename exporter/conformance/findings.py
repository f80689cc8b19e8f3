"""What a conformance run found: one row per invariant, and the whole."""

import dataclasses
import json
from dataclasses import dataclass

from sinkring.exporter.machine import Machine
from sinkring.exporter.verdict import plain
from sinkring.runtime.manifest import Ring

TITLES = {
    "I1": "any cutting of the input gives the same logits",
    "I2": "native policy = masked dense eager model",
    "I3": "streaming policy = literal StreamingLLM",
    "I4": "a row equals a solo run",
    "I5": "a reset row equals a fresh one",
    "I6": "snapshot, restore, continue = never stopped",
    "I7": "rolled back = never fed",
    "I8": "nothing grows",
    "I9": "age does not matter",
    "I10": "everything counts",
    "I11": "what is not supported is refused",
    "I12": "all forms of the graphs agree, at every age",
}


@dataclass(frozen=True)
class Check:
    """One invariant. worst: the worst figure that was seen, in the unit that `measure` names; it passes up to `tolerance`.

    passed is None for an invariant that is not of this bundle (`tried` says why); worst is infinite for logits that are not finite and
    for a check that ended in an error, which `detail` names.
    """

    invariant: str
    tried: str
    measure: str
    worst: float | None
    tolerance: float | None
    passed: bool | None
    detail: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.invariant]


def not_of_this_bundle(invariant: str, why: str) -> Check:
    return Check(invariant, f"not of this bundle: {why}", "", None, None, None)


@dataclass(frozen=True)
class Conformance:
    """The result of `check_conformance`. tokens: of the text that all checks feed; scale: the oracle's largest |logit| over it.

    tolerance: largest |error| against the oracle that passes, in logits. sabotage: what was broken on purpose, or None.
    """

    bundle: str
    model: str
    suite: str
    backend: str
    policy: str
    dtype: str
    cache_dtype: str
    batch: int
    chunk: int
    rings: tuple[Ring, ...]
    ids: str
    tokens: int
    scale: float
    tolerance: float
    sabotage: str | None
    checks: tuple[Check, ...]
    seconds: float
    versions: dict[str, str]
    machine: Machine

    @property
    def passed(self) -> bool:
        """Whether no invariant of this bundle is broken, and at least one was checked."""
        verdicts = [check.passed for check in self.checks if check.passed is not None]
        return bool(verdicts) and all(verdicts)

    def to_json(self) -> str:
        """The whole result, with `passed`. A figure that is not finite is null."""
        raw = plain(dataclasses.asdict(self))
        for row, check in zip(raw["checks"], self.checks, strict=True):
            row["title"] = check.title
        return json.dumps({"passed": self.passed, **raw}, indent=2, allow_nan=False) + "\n"
