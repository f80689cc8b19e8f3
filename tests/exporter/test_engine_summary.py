"""The row of a built engine: what its report says, as `inspect` and `build` print it."""

from typing import Any

import pytest
from sinkring.exporter.cli_inspect import print_engines
from sinkring.exporter.engine_summary import EngineSummary
from sinkring.runtime.errors import BundleError


def report(scratch_bytes: int | None) -> dict[str, Any]:
    updates = [{"in_place": True}, {"in_place": False}]
    layer = {"updates": updates, "copies": [{"kind": "operand"}], "fused": True, "attention": ["_gemv_mha_v1_myl0_4"]}
    plan = {"layers": [layer, layer], "kernels": 391, "scratch_bytes": scratch_bytes}
    named = {"engine_path": "engines/a.engine", "role": "decode", "target": "tensorrt-rtx", "sm": 89, "builder_version": "1.7.1"}
    return {**named, "plan": plan, "engine_bytes": 123_456, "build_s": 7.25, "faults": [], "warnings": ["layer 0: slow"]}


def test_the_table_shows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    print_engines([EngineSummary.from_report(report(8_395_776), "a.json")])
    headings, row, warning = capsys.readouterr().out.splitlines()
    titles = (
        "engine",
        "layers",
        "in-place updates",
        "attention kernel",
        "cache-sized copies",
        "kernels",
        "scratch bytes",
        "bytes",
        "seconds",
    )
    assert all(title in headings for title in titles)
    assert row.split() == ["engines/a.engine", "2", "2/4", "_gemv_mha_v1", "2", "a", "step", "391", "8,395,776", "123,456", "7.2"]
    assert warning == "engines/a.engine: layer 0: slow"


def test_what_the_builder_did_not_say_is_not_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    print_engines([EngineSummary.from_report(report(None), "a.json")])
    _, row, _ = capsys.readouterr().out.splitlines()
    assert row.split()[7:10] == ["391", "not", "said"]


def test_a_report_that_is_none_is_refused() -> None:
    with pytest.raises(BundleError, match=r"a\.json: is not a build report"):
        EngineSummary.from_report({"plan": {}}, "a.json")
