"""The parity table, policy native: sinks and a window, a capacity, or trained windows alone."""

from pathlib import Path

import pytest

from tests.parity.family_cases import AS_ROWS, FamilyCase, cases, check_family

# Caches that do not wrap: alone, beside rings of trained windows, with ALiBi, and with angles that depend on the length.
LINEAR = [FamilyCase(row, "capacity") for row in ("llama", "gemma3_text", "ministral", "falcon-alibi", "phi3-longrope")]
CASES = [*cases("native", "trained"), *LINEAR]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_eager_pytorch(case: FamilyCase, tmp_path: Path) -> None:
    check_family(case, tmp_path)


def test_every_form_has_its_cases() -> None:
    assert set(AS_ROWS) <= {*CASES, *cases("streaming")}
