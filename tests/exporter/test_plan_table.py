"""The table of plans, and that no upgrade of the builder or change of a graph changes a plan unseen."""

import dataclasses

import pytest
from sinkring.exporter.plan_table import PlanRow, differences

from tests.exporter.plan_golden import found_rows, kept_rows


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[PlanRow]:
    pytest.importorskip("tensorrt_rtx")
    return found_rows(tmp_path_factory.mktemp("plans"))


def test_plans_are_as_they_were_kept(found: list[PlanRow]) -> None:
    changed = differences(kept_rows(), found)
    assert not changed, "\n".join(["plans changed; if they are good: python -m tests.exporter.plan_golden", *changed])


def test_kept_plans_keep_the_promises() -> None:
    """What is kept is not wrong by itself: in place on every GPU that builds it, one fused kernel and no copy in a step."""
    rows = kept_rows()
    assert {row.sm for row in rows if row.refusal} <= {75}, "only Turing refuses products of float32"
    built = [row for row in rows if not row.refusal]
    assert all(row.in_place == "4/4" for row in built)
    assert all(row.copies == 0 and "gemv" in row.attention for row in built if row.role == "decode")
    assert {(row.dtype, row.role) for row in built} == {(d, r) for d in ("float32", "float16") for r in ("decode", "prefill")}


def test_a_refusal_is_a_row_with_its_reason(found: list[PlanRow]) -> None:
    refused = [row for row in found if row.refusal]
    assert refused
    assert all("FP32 GEMM is not supported" in row.refusal and "sm=75" in row.refusal and row.kernels == 0 for row in refused)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"copies": 2}, "sm89 float32 decode T=1: copies was 0, is 2"),
        ({"attention": "2 products a layer"}, "sm89 float32 decode T=1: attention was '_gemv_mha_v1', is '2 products a layer'"),
        ({"refusal": "no such kernel"}, "sm89 float32 decode T=1: refusal was 'built', is 'refused'"),
    ],
)
def test_each_changed_figure_is_named(change: dict[str, object], line: str) -> None:
    kept = kept_rows()
    at = next(index for index, row in enumerate(kept) if (row.sm, row.dtype, row.role) == (89, "float32", "decode"))
    now = [*kept]
    now[at] = dataclasses.replace(kept[at], **change)  # type: ignore[arg-type]
    assert differences(kept, now) == [line]


def test_rows_that_come_and_go_are_named() -> None:
    kept = kept_rows()
    assert differences(kept, kept[1:]) == ["sm75 float32 decode T=1: is gone"]
    assert differences(kept[1:], kept) == ["sm75 float32 decode T=1: is new"]
    assert differences(kept, [dataclasses.replace(row, engine_bytes=1) for row in kept]) == []
