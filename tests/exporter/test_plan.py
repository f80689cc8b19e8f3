"""Recorded plans, good and bad: the lint passes the good ones and names layer, kernel and sizes of the bad ones."""

import dataclasses
import json
from pathlib import Path

import pytest
from sinkring.exporter.plan import PlanReport, read_plan
from sinkring.runtime.errors import BuildError

from tests.exporter.data.make_plans import SUMMED
from tests.exporter.hand_bundle import CAPACITY, CHUNK, HEAD_SIZE, KV_HEADS, ring_states

DATA = Path(__file__).parent / "data"
CACHE_BYTES = KV_HEADS * CAPACITY * HEAD_SIZE * 4


def read(name: str, tokens: int = 1, layers: int = 1) -> PlanReport:
    return read_plan((DATA / f"{name}.plan.txt").read_text(encoding="utf-8"), ring_states(layers), tokens)


def test_the_good_decode_plan_keeps_every_promise() -> None:
    report = read("good_decode", layers=2)
    assert report.faults() == ()
    assert report.warnings() == ()
    assert [plan.layer for plan in report.layers] == [0, 1]
    for plan in report.layers:
        assert plan.fused
        assert len(plan.attention) == 1
        assert plan.attention[0].startswith("_gemv_mha_v1")
        assert plan.copies == ()
        assert all(update.in_place and "Scat" in str(update.kernel) for update in plan.updates)
        assert {update.cache for update in plan.updates} == {f"cache.{plan.layer}.k", f"cache.{plan.layer}.v"}
    assert sum(plan.kernels for plan in report.layers) < report.kernels
    assert report.scratch_bytes is not None
    assert report.weight_bytes is not None


@pytest.mark.parametrize(
    ("name", "tokens", "caches", "kernel"),
    [
        ("scale_one", 1, ["cache.0.k"], "__myl_Move_"),
        ("where_write", 1, ["cache.0.k", "cache.0.v"], "Sele"),
        ("shift_write", 1, ["cache.0.k", "cache.0.v"], "Conc"),
        ("scatter_nd_write", 1, ["cache.0.k", "cache.0.v"], "__myl_Tran_"),
        ("scale_one_prefill", CHUNK, ["cache.0.k"], "__myl_Move_"),
    ],
)
def test_a_rewritten_cache_is_named_with_kernel_and_sizes(name: str, tokens: int, caches: list[str], kernel: str) -> None:
    faults = read(name, tokens).faults()
    rewrites = [fault for fault in faults if "rewrites the whole of" in fault]
    assert len(rewrites) == len(caches)
    for cache, fault in zip(caches, rewrites, strict=True):
        assert fault.startswith("layer 0: ")
        assert kernel in fault
        assert f"{cache} ({cache}.updated [1,{KV_HEADS},{CAPACITY},{HEAD_SIZE}], {CACHE_BYTES} bytes" in fault
    for update in read(name, tokens).layers[0].updates:
        assert update.in_place == (update.cache not in caches)


def test_a_copy_before_a_product_is_a_fault_in_decode_and_a_record_in_prefill() -> None:
    decode = read("folded_decode")
    assert sum("makes a copy of" in fault for fault in decode.faults()) == 2
    assert any("not one fused kernel" in fault for fault in decode.faults())

    prefill = read("folded_prefill", CHUNK)
    assert prefill.faults() == ()
    assert prefill.warnings() == ()
    assert [(copy.cache, copy.kind, copy.copy_bytes) for copy in prefill.layers[0].copies] == [
        ("cache.0.k", "operand", CACHE_BYTES),
        ("cache.0.v", "operand", CACHE_BYTES),
    ]


def test_products_written_as_sums_are_attention_that_reads_the_caches_in_place() -> None:
    text = (DATA / "summed_decode.plan.txt").read_text(encoding="utf-8")
    report = read_plan(text, SUMMED.states, 1)
    assert report.faults() == ()
    (layer,) = report.layers
    assert not layer.fused
    assert not report.lacks_fused_kernel()
    assert [name.count("MulSum") for name in layer.attention] == [1, 1]
    assert layer.copies == ()
    # The same kernel that writes something as large as the cache beside its sum has copied it.
    (line,) = [line for line in text.splitlines() if layer.attention[0] in line]
    copying = line.replace("Outputs: [", "Outputs: [ { Name: copy, Dimensions: [1,2,16,8], Datatype: Float},")
    faults = read_plan(text.replace(line, copying), SUMMED.states, 1).faults()
    assert any("makes a copy of key_ring (copy [1,2,16,8]" in fault for fault in faults)


def test_a_chunk_that_widens_a_cache_has_not_expanded_its_heads() -> None:
    """float16 caches copied as float32 for a product: twice the bytes, and as many elements."""
    states = tuple(dataclasses.replace(state, dtype="float16") for state in ring_states(1))
    report = read_plan((DATA / "folded_prefill.plan.txt").read_text(encoding="utf-8"), states, CHUNK)
    assert [copy.copy_bytes for copy in report.layers[0].copies] == [2 * copy.cache_bytes for copy in report.layers[0].copies]
    assert report.warnings() == ()


def test_expanding_the_kv_heads_of_a_chunk_is_warned_of() -> None:
    report = read("expanded_prefill", CHUNK)
    assert report.faults() == ()
    assert len(report.warnings()) == 2
    assert all("expanded to the query heads" in warning for warning in report.warnings())
    assert all(copy.copy_bytes == 2 * CACHE_BYTES for copy in report.layers[0].copies)


def test_a_cache_that_the_plan_never_writes_is_a_fault() -> None:
    report = read("good_decode", layers=3)
    faults = report.faults()
    assert any(fault.startswith("layer 2: cache.2.k is not updated in place (no kernel writes it") for fault in faults)
    assert any(fault.startswith("layer 2: no kernel multiplies with its caches") for fault in faults)
    assert not any(fault.startswith(("layer 0", "layer 1")) for fault in faults)


def test_a_plan_whose_attention_kernel_is_gone_is_a_fault() -> None:
    lines = (DATA / "good_decode.plan.txt").read_text(encoding="utf-8").splitlines()
    kept = "\n".join(line for line in lines if "Name: _gemv_mha" not in line)
    faults = read_plan(kept, ring_states(2), 1).faults()
    assert len(faults) == 2
    assert all("attention is missing" in fault for fault in faults)


def test_two_copies_of_one_cache_hint_at_padding() -> None:
    report = read("folded_prefill", CHUNK)
    (layer,) = report.layers
    padded = dataclasses.replace(layer, copies=(*layer.copies, layer.copies[0]))
    (warning,) = dataclasses.replace(report, layers=(padded,)).warnings()
    assert "cache.0.k is copied 2 times" in warning
    assert "multiple of 8" in warning


def test_a_log_without_a_plan_is_an_error_not_a_pass() -> None:
    with pytest.raises(BuildError, match="listed no kernels"):
        read_plan("Engine generation completed in 0.1 seconds.\n", ring_states(), 1)


def test_the_report_is_plain_data() -> None:
    report = read("scale_one")
    assert json.loads(json.dumps(dataclasses.asdict(report)))["layers"][0]["copies"][0]["cache"] == "cache.0.k"
