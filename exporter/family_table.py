"""`sinkring families`: what is exported, family by family, and what is refused, with the reason; all of it from the registry."""

from collections.abc import Sequence
from dataclasses import dataclass

from sinkring.models.refused import REFUSED
from sinkring.models.registry import Family, Windows, families

# Of the layers with full attention; those with a trained window keep it, whatever the policy.
_POLICIES: dict[Windows, str] = {
    "no": "streaming, native, capacity",
    "some layers": "full layers: streaming, native, capacity",
    "some layers, if set": "full layers: streaming, native, capacity",
    "all layers": "none, its window decides",
    "all layers, if set": "streaming, native, capacity; with a window, none",
}
HEADINGS = ("model_type", "examples", "policies", "special", "trained windows", "rope types", "decode on TensorRT-RTX")
REFUSED_HEADINGS = ("model_type", "reason")


@dataclass(frozen=True)
class FamilyRow:
    """One family, each field as a table shows it."""

    name: str
    examples: str
    policies: str
    special: str
    windows: str
    rope_types: tuple[str, ...]
    plan: str

    def cells(self) -> tuple[str, ...]:
        """In the order of HEADINGS."""
        return (self.name, self.examples, self.policies, self.special, self.windows, rope_names(self.rope_types), self.plan)


@dataclass(frozen=True)
class RefusedRow:
    """Architectures that are refused for one reason."""

    names: tuple[str, ...]
    reason: str

    def cells(self) -> tuple[str, ...]:
        return (", ".join(self.names), self.reason)


def list_families() -> tuple[FamilyRow, ...]:
    """Every family, by name."""
    return tuple(_row(family) for family in families().values())


def list_refused() -> tuple[RefusedRow, ...]:
    """What is refused by name; everything else that is no family is refused as unknown."""
    reasons = dict.fromkeys(REFUSED.values())
    return tuple(RefusedRow(tuple(name for name, other in REFUSED.items() if other == reason), reason) for reason in reasons)


def rope_names(types: tuple[str, ...]) -> str:
    """A family that takes every type says so in a word."""
    from sinkring.models.registry import ROPE_TYPES

    return "all" if types == ROPE_TYPES else ", ".join(types) or "none"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As the README has it."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(family: Family) -> FamilyRow:
    rope_types = family.rope_types if family.rotary and family.frequencies is None else ()
    return FamilyRow(
        name=family.name,
        examples=family.examples,
        policies=_POLICIES[family.windows],
        special=family.special,
        windows=family.windows,
        rope_types=("default",) if family.frequencies is not None else rope_types,
        plan=family.plan,
    )
