"""The parity table once more, in the form of TensorRT 10.3: graphs that read the rings and give out new rows, which the runtime writes.

What the form itself decides: rotary and ALiBi, softcap, learned sink logits, rings of several geometries, a linear cache beside them.
"""

from pathlib import Path

import pytest

from tests.parity.family_cases import FamilyCase, check_family

CASES = [
    FamilyCase("llama", "streaming"),
    FamilyCase("gemma2", "streaming"),
    FamilyCase("gemma3_text", "native"),
    FamilyCase("gpt_oss", "streaming"),
    FamilyCase("bloom", "streaming"),
    FamilyCase("ministral", "capacity"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_eager_pytorch(case: FamilyCase, tmp_path: Path) -> None:
    check_family(case, tmp_path, ["tensorrt-10.3"])
