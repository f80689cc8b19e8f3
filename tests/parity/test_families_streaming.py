"""The parity table, policy streaming: sinks at the distance they have in the cache."""

from pathlib import Path

import pytest

from tests.parity.family_cases import FamilyCase, cases, check_family


@pytest.mark.parametrize("case", cases("streaming"), ids=str)
def test_logits_are_those_of_eager_pytorch(case: FamilyCase, tmp_path: Path) -> None:
    check_family(case, tmp_path)
