"""Engines of families that are not Llama's kind, by the real builder; `scripts/plan_families.py` builds all of them."""

import importlib.util
from pathlib import Path

import pytest

from tests.models.tiny_families import find_row

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan_families.py"


# Learned sink logits, experts and two rings; ALiBi and as many KV heads as query heads.
@pytest.mark.parametrize("name", ["gpt_oss", "falcon-alibi"])
def test_decode_copies_nothing_and_both_graphs_write_in_place(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    spec = importlib.util.spec_from_file_location("plan_families", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    row = find_row(name)
    decode, prefill = script.plan_family(row, tmp_path)
    assert (decode.role, prefill.role) == ("decode", "prefill")
    assert (decode.fault, prefill.fault) == ("", "")
    assert decode.copies == 0
    assert decode.in_place == prefill.in_place == f"{2 * row.layers}/{2 * row.layers}"
