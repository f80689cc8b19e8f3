"""`sinkring bench`: what is measured where. Not one time is asserted: a busy machine would fail it."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save
from sinkring.exporter.bench import measure, session
from sinkring.exporter.bench.bandwidth import BUFFER_BYTES, BandwidthProbe
from sinkring.exporter.bench.measure import BundleCost, bench_bundles
from sinkring.exporter.bench.placing import full_at, place
from sinkring.exporter.bench.read_bytes import step_read_bytes
from sinkring.exporter.bench.session import OLDEST, BenchSession
from sinkring.exporter.picture import check_picture
from sinkring.exporter.reference_text import ReferenceIds
from sinkring.runtime import Manifest, open_bundle
from sinkring.runtime.errors import InputError

from tests.exporter.invoke_cli import invoke
from tests.exporter.tiny_bundle import shared_tiny

QUICK = ("--rounds", 1, "--steps", 2, "--prompt", 9, "--threads", 1)


@pytest.fixture(scope="module")
def one_row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_tiny(tmp_path_factory, sinks=2, window=8, chunk=4)


@pytest.fixture(scope="module")
def three_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_tiny(tmp_path_factory, sinks=2, window=8, chunk=4, batch=3)


def test_the_json_holds_every_figure_of_every_bundle(one_row: Path, three_rows: Path, tmp_path: Path) -> None:
    plot = tmp_path / "bench.png"
    ended = invoke("bench", one_row, three_rows, *QUICK, "--plot", plot, "--json")
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert found["plot"] == str(plot)
    assert (found["backend"], found["device"], found["threads"], found["rounds"]) == ("onnxruntime", "cpu", 1, 1)
    assert found["bandwidth"]["samples"] == 1
    for cost, batch in zip(found["bundles"], (1, 3), strict=True):
        assert set(cost) == {field.name for field in dataclasses.fields(BundleCost)}
        capacity = cost["capacity_slots"]
        assert [int(position) for position in cost["step_ms"]] == [0, capacity // 2, capacity, 10 * capacity, OLDEST]
        assert all(spread["samples"] == 2 for spread in cost["step_ms"].values())
        assert (cost["batch"], cost["full_position"], cost["prompt_tokens"]) == (batch, capacity, 9)
        # Times of the same steps, so that what must hold of them holds on any machine.
        assert cost["tokens_per_second"] == pytest.approx(batch / cost["step_ms"][str(capacity)]["median"] * 1e3)
        assert all(0 < share < 1 for share in cost["host_share"].values())
        assert cost["read_bytes"] == cost["weight_read_bytes"] + cost["cache_bytes"]
    one, three = found["bundles"]
    assert three["cache_bytes"] == 3 * one["cache_bytes"]
    # Weights are read once for all rows, but each row looks its own token and angles up.
    assert one["weight_read_bytes"] < three["weight_read_bytes"] < 1.01 * one["weight_read_bytes"]


def test_the_table_names_what_was_measured(one_row: Path) -> None:
    ended = invoke("bench", one_row, *QUICK)
    assert ended.status == 0, ended.err
    for words in ("memory bandwidth", "step at 0", ", full", "step at 1,000,000", "paced", "host work", "first token after", "resident"):
        assert words in ended.out, words


def test_a_linear_cache_is_measured_as_far_as_it_goes(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = shared_tiny(tmp_path_factory, policy="native", capacity=29, chunk=4)
    (cost,) = bench_bundles([bundle], rounds=1, steps=40, prompt=100, threads=1).bundles
    assert list(cost.step_ms) == [0, 14]
    assert cost.step_ms[14].samples == 29 - 14 - 2
    assert cost.prompt_tokens == 29


def test_a_folder_that_is_no_bundle_is_told_of_before_any_is_opened(one_row: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "BenchSession", lambda *_: pytest.fail("opened one"))
    ended = invoke("bench", one_row, tmp_path / "none", *QUICK)
    assert ended.status == 2
    assert "no such bundle folder" in ended.errors[0]


def test_rings_are_filled_with_text(one_row: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random ids the next is as good as unknown, and a nucleus then many times as large."""
    asked = []

    def text(bundle: Path, manifest: Manifest, tokens: int) -> ReferenceIds:
        asked.append(tokens)
        return ReferenceIds(np.arange(tokens) % 7, "text")

    monkeypatch.setattr(session, "read_reference_ids", text)
    monkeypatch.setattr(session, "MOST_TEXT_TOKENS", 10)
    with closing(BenchSession(one_row, "onnxruntime", None, {"threads": 1})) as found:
        history = found._full_state[0]["history"]
    assert asked == [10]
    assert history == [*np.arange(10) % 7, *np.arange(len(history) - 10) % 7]


@pytest.mark.parametrize("option", ["--rounds", "--steps", "--prompt", "--threads"])
def test_a_number_below_one_is_refused(one_row: Path, option: str) -> None:
    ended = invoke("bench", one_row, option, 0)
    assert ended.status == 2
    assert "0: must be" in ended.errors[0]


@pytest.mark.parametrize(
    ("command", "place", "reason"),
    [
        (("bench", "--plot"), "file/x.png", "no writable folder"),
        (("bench", "--plot"), "x.xyz", "unknown kind"),
        (("bench", "--plot"), ".", "is a folder"),
        (("perplexity", "--text", "topics", "--out"), "file", "no writable folder"),
    ],
)
def test_a_place_that_no_picture_can_go_to_is_refused_before_anything_is_measured(
    one_row: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    measured: list[object] = []
    monkeypatch.setattr("sinkring.exporter.bench.measure.bench_bundles", lambda *args, **options: measured.append(args))
    monkeypatch.setattr("sinkring.exporter.perplexity.measure_perplexity", lambda *args, **options: measured.append(args))
    ended = invoke(command[0], one_row, *command[1:], tmp_path / place)
    assert (ended.status, measured) == (2, [])
    assert reason in ended.errors[0]


def test_a_check_leaves_a_picture_that_is_there_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"of an earlier run")
    check_picture(tmp_path / "x.png")
    check_picture(tmp_path / "new" / "x.png")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert (tmp_path / "x.png").read_bytes() == b"of an earlier run"


def test_no_bundle_is_refused() -> None:
    with pytest.raises(InputError, match="bundles=0"):
        bench_bundles([])


@pytest.mark.parametrize("position", [9, 18, 19, 180, OLDEST])
def test_a_placed_stream_has_each_token_in_its_slot(one_row: Path, position: int) -> None:
    """Every slot's value says which token lies there, as the ring arithmetic's own `token_at` has it."""
    with open_bundle(one_row, threads=1) as decoder:
        geometry, manifest = decoder.manifest.rings[0].geometry, decoder.manifest
        full = full_at(decoder)
        assert full == geometry.capacity
        stream = decoder.stream()
        stream.feed(np.arange(full))
        record, tensors = stream.capture()
        name = manifest.states[0].name
        tensors[name][0, 0, :, 0] = [geometry.token_at(slot, full - 1) for slot in range(geometry.capacity)]
        placed_record, placed = place((record, tensors), manifest, position)
        assert (placed_record["fed"], placed_record["reached"]) == (position, position)
        for slot, value in enumerate(placed[name][0, 0, :, 0].tolist()):
            token = geometry.token_at(slot, position - 1)
            moved = 0 if token is None else token if slot < geometry.sinks_tokens else token - (position - full)
            assert value == moved, (slot, token)
        assert tensors[name][0, 0, 0, 0] == 0
        stream.install(placed_record, placed)
        assert stream.position == position
        stream.feed([1])


def test_bytes_of_a_step_are_those_that_it_reads(one_row: Path, tmp_path: Path) -> None:
    """A table that is only looked up in costs its rows, one that is multiplied with as well costs once."""
    manifest = Manifest.read(one_row)
    tensors = [
        helper.make_tensor("table", TensorProto.FLOAT, (5, 4), [0.0] * 20),
        helper.make_tensor("tied", TensorProto.FLOAT, (6, 4), [0.0] * 24),
        helper.make_tensor("blocks", TensorProto.UINT8, (7,), [0] * 7),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["one"]),
        helper.make_node("Gather", ["tied", "ids"], ["two"]),
        helper.make_node("Gemm", ["one", "tied"], ["three"], transB=1),
        helper.make_node("Identity", ["blocks"], ["four"]),
    ]
    graph = helper.make_graph(nodes, "step", [helper.make_tensor_value_info("ids", TensorProto.INT64, (3,))], [], tensors)
    path = tmp_path / manifest.graph("decode", "onnxruntime").path
    save(helper.make_model(graph), path)
    assert step_read_bytes(tmp_path, manifest, "onnxruntime") == 24 * 4 + 7 + 3 * 4 * 4 + manifest.cache_bytes


def test_the_clock_of_the_host_is_taken_off_again(one_row: Path) -> None:
    session = BenchSession(one_row, "onnxruntime", None, {"threads": 1})
    run = session.decoder.backend.decode
    whole, outside = session.time_host(2, {"temperature": 0.0})
    assert 0 < outside < whole
    assert session.decoder.backend.decode == run
    session.close()


def test_bandwidth_reads_all_of_the_buffer() -> None:
    with BandwidthProbe(3) as probe:
        assert sum(part.nbytes for part in probe._parts) == BUFFER_BYTES
        assert probe.sample() > 0
