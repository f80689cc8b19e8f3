"""`sinkring families` and the README say what the registry says, and that is what the models of the parity table have."""

import json
from pathlib import Path

import pytest
from sinkring.exporter.family_table import HEADINGS, REFUSED_HEADINGS, list_families, list_refused, markdown_table
from sinkring.models.refused import REFUSED
from sinkring.models.registry import FUSED, families

from tests.exporter.invoke_cli import invoke
from tests.models.tiny_families import TINY_FAMILIES, TinyFamily

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PLANS = ROOT / "docs" / "results" / "plan-families.json"


def test_readme_has_the_same_tables() -> None:
    text = README.read_text(encoding="utf-8")
    assert markdown_table(HEADINGS, [row.cells() for row in list_families()]) in text
    assert markdown_table(REFUSED_HEADINGS, [row.cells() for row in list_refused()]) in text
    assert f"[{len(families())} families of decoders]" in text


def test_the_command_prints_every_family_and_every_refusal() -> None:
    ended = invoke("families")
    assert ended.status == 0
    assert all(f"\n{name} " in ended.out for name in families())
    assert all(name in ended.out for name in REFUSED)
    found = json.loads(invoke("families", "--json").out)
    assert [row["name"] for row in found["families"]] == list(families())
    assert {name for row in found["refused"] for name in row["names"]} == set(REFUSED)


def test_every_family_has_a_row_in_the_parity_table() -> None:
    assert {row.name.partition("-")[0] for row in TINY_FAMILIES if _is_exported(row)} == set(families())


@pytest.mark.parametrize("row", TINY_FAMILIES, ids=lambda row: row.name)
def test_what_is_special_is_said(row: TinyFamily) -> None:
    if not _is_exported(row):
        return
    family = families()[row.name.partition("-")[0]]
    said = {"interleaved": family.interleaved, "partial": family.partial, "ALiBi": bool(family.alibi_slopes)}
    said["NoPE"] = any(row.rotary) and not all(row.rotary)
    said["experts"] = any("experts" in setting for setting in row.settings)
    said["softcap"] = "attn_logit_softcapping" in row.settings
    missing = [word for word, is_so in said.items() if is_so and word not in family.special]
    assert not missing, f"{family.name} is {family.special!r}, without a word of {missing}"
    if None not in row.sliding:
        assert family.windows.startswith("all layers")
    elif any(row.sliding):
        assert family.windows.startswith("some layers")


def test_plans_are_those_that_were_built() -> None:
    engines = json.loads(PLANS.read_text(encoding="utf-8"))["engines"]
    assert {engine["row"] for engine in engines} == {row.name for row in TINY_FAMILIES if _is_exported(row)}
    for engine in engines:
        done, caches = engine["in_place"].split("/")
        assert (engine["fault"], done) == ("", caches), engine
        if engine["role"] == "decode":
            assert engine["copies"] == 0, engine
            fused = families()[engine["row"].partition("-")[0]].plan == FUSED
            assert fused == engine["attention"].startswith("_gemv_mha"), engine


def _is_exported(row: TinyFamily) -> bool:
    """The tables of tests have models that only the oracle runs, too."""
    return row.name.partition("-")[0] not in REFUSED
