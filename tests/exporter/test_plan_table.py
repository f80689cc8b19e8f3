"""The table of plans, and that no upgrade of the builder or change of a graph changes a plan unseen."""

import dataclasses
from itertools import product

import pytest
from sinkring.exporter.plan_table import PlanRow, differences

from tests.exporter.plan_golden import found_rows, kept_rows

ROLES = ("decode", "prefill")


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
    assert {row.sm for row in rows if row.refusal} <= {75}, "only Turing lacks products of float32, and bfloat16"
    built = [row for row in rows if not row.refusal]
    assert all(row.in_place == "4/4" for row in built)
    assert all(row.copies == 0 and "gemv" in row.attention for row in built if row.role == "decode")
    assert {(row.dtype, row.role) for row in built} == set(product(("float32", "float16", "bfloat16"), ROLES))


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        ("float32", "sm=75: IBuilder::buildSerializedNetwork"),
        ("float32", "FP32 GEMM is not supported"),
        ("float16", "FP32 GEMM is not supported"),
        ("bfloat16", "sm=75: the bundle has dtype bfloat16"),
        ("bfloat16", "GPUs have bfloat16 from sm=80 on"),
    ],
)
def test_a_refusal_is_a_row_with_its_reason(found: list[PlanRow], dtype: str, reason: str) -> None:
    """The builder's own of a float32 product, and ours of bfloat16, before anything is built."""
    for rows in (found, kept_rows()):
        refused = [row for row in rows if row.refusal and row.dtype == dtype]
        assert [(row.sm, row.role) for row in refused] == [(75, role) for role in ROLES]
        assert all(reason in row.refusal and (row.kernels, row.engine_bytes) == (0, 0) for row in refused)


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
