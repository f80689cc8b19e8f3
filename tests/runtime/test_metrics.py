"""What a decoder says of itself: counted right, and an alarm that lets nothing out."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError, DependencyError, InputError, NumericalError
from sinkring.runtime.metrics import LARGEST_LOGIT, RECENT_CALLS, Recorder, numerical_fault

from tests.runtime.stream_case import IDS


@pytest.fixture
def decoder(tiny_bundle: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle, threads=1) as opened:
        yield opened


def poison(stream: Stream, value: float = float("nan")) -> None:
    backend = stream._decoder.backend
    backend.write_row(stream.row, {name: np.full_like(row, value) for name, row in backend.read_row(stream.row).items()})


def test_a_decoder_that_has_done_nothing(decoder: Decoder) -> None:
    found = decoder.metrics()
    assert (found.positions, found.tokens, found.tokens_per_second, found.step_p50_ms, found.step_p99_ms) == ({}, 0, None, None, None)
    assert (found.wraps, found.resets, found.refusals, found.numerical_alarms) == (0, 0, 0, 0)
    assert found.cache_bytes == decoder.cache_bytes > 0


def test_tokens_positions_wraps_and_resets(decoder: Decoder) -> None:
    stream = decoder.stream()
    geometry = decoder.manifest.rings[0].geometry
    stream.feed(IDS[: geometry.capacity])
    assert decoder.metrics().wraps == 0
    # The next token is the first that overwrites one.
    stream.feed([1])
    assert decoder.metrics().wraps == 1
    stream.feed(np.resize(IDS, 2 * geometry.slots))
    found = decoder.metrics()
    assert found.wraps == 3
    assert found.positions == {0: stream.position}
    assert found.tokens == stream.position
    assert found.tokens_per_second is not None
    list(stream.generate(5, stop_ids=()))
    # The fifth is not yet written.
    assert decoder.metrics().tokens == stream.position - 1
    stream.reset()
    assert (decoder.metrics().resets, decoder.metrics().positions) == (1, {0: 0})


def test_wraps_are_those_of_the_slots(decoder: Decoder) -> None:
    geometry = decoder.manifest.rings[0].geometry
    restarts = 0
    for tokens in range(1, 5 * geometry.capacity):
        at = tokens - 1
        restarts += at > geometry.sinks_tokens and geometry.slot(at) == geometry.sinks_tokens
        assert geometry.wraps_within(tokens) == restarts


def test_each_refusal_is_counted_once(decoder: Decoder) -> None:
    stream = decoder.stream()
    calls = (
        lambda: stream.feed([]),
        lambda: stream.feed([10**6]),
        lambda: stream.generate(1),  # the stream is empty
        lambda: decoder.step({}),
        lambda: decoder.step({stream: -1}),
        lambda: stream.rollback(3),
        lambda: decoder.stream(),
        lambda: stream.fork(),
    )
    for refused, call in enumerate(calls, 1):
        with pytest.raises((InputError, CapacityError)):
            call()
        assert decoder.metrics().refusals == refused
    assert decoder.metrics().tokens == 0


def test_step_times_are_those_of_decode_calls(decoder: Decoder) -> None:
    stream = decoder.stream()
    stream.feed(IDS[:4])
    assert decoder.metrics().step_p50_ms is None, "a prompt is no step"
    for token in IDS[:20]:
        stream.feed([int(token)])
    found = decoder.metrics()
    assert found.step_p50_ms is not None
    assert found.step_p99_ms is not None
    assert 0 < found.step_p50_ms <= found.step_p99_ms


def test_percentiles_are_of_the_latest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr("sinkring.runtime.metrics.time.perf_counter", lambda: 10.0)
    for _ in range(RECENT_CALLS):
        recorder.call(began=9.0, tokens=1, decode=True)
    for _ in range(RECENT_CALLS - 2):
        recorder.call(began=9.998, tokens=1, decode=True)
    assert recorder.step_percentile(50) == pytest.approx(2)
    assert recorder.step_percentile(100) == pytest.approx(1000)
    assert recorder.rate() == pytest.approx(RECENT_CALLS / (2 + (RECENT_CALLS - 2) * 0.002))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2 * LARGEST_LOGIT, -2 * LARGEST_LOGIT])
def test_logits_that_are_no_numbers_are_told(value: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    assert numerical_fault(logits) is None
    logits[1, 4] = value
    assert numerical_fault(logits) is not None


def test_a_stream_with_an_alarm_gives_nothing_until_it_is_reset(decoder: Decoder, tmp_path: Path) -> None:
    stream = decoder.stream()
    expected = stream.feed(IDS[:20])
    poison(stream)
    loop = stream.generate(10, stop_ids=())
    next(loop)  # from logits that were sound
    with pytest.raises(NumericalError, match=r"position 21 are not finite.*reset the stream"):
        next(loop)
    assert stream.alarm == "are not finite"
    poison(stream, 0.0)
    for call in (
        lambda: stream.feed([1]),
        lambda: next(stream.generate(1)),
        lambda: stream.sample(),
        lambda: decoder.step({stream: 1}),
        lambda: stream.rollback(1),
        lambda: stream.snapshot(tmp_path / "stopped"),
    ):
        with pytest.raises(NumericalError):
            call()
    assert not (tmp_path / "stopped").exists()
    found = decoder.metrics()
    assert (found.numerical_alarms, found.refusals) == (1, 0)
    stream.reset()
    assert stream.alarm is None
    np.testing.assert_array_equal(stream.feed(IDS[:20]), expected)


def test_a_tool_that_measures_gets_the_logits_as_they_are(tiny_bundle: Path) -> None:
    with open_bundle(tiny_bundle, threads=1, alarms=False) as decoder:
        stream = decoder.stream()
        stream.feed(IDS[:20])
        poison(stream)
        assert np.isnan(stream.feed([1])).all()
        assert np.isnan(stream.feed([1])).all()
        with pytest.raises(InputError, match="not finite"):
            stream.sample()  # and yet no token comes of them
        assert (stream.alarm, decoder.metrics().numerical_alarms) == (None, 0)


def test_a_stream_that_comes_back_with_bad_logits_is_stopped(tiny_bundle: Path, tmp_path: Path) -> None:
    """What a tool that measures has saved: for anyone else they are what they were when they were computed."""
    with open_bundle(tiny_bundle, threads=1, alarms=False) as decoder:
        stream = decoder.stream()
        poison(stream)
        stream.feed([1])
        stream.snapshot(tmp_path / "bad")
    with open_bundle(tiny_bundle, threads=1) as decoder:
        restored = decoder.restore(tmp_path / "bad")
        assert restored.alarm == "are not finite"
        with pytest.raises(NumericalError, match="reset the stream"):
            restored.sample()


def test_logits_that_a_rollback_has_made_void_stop_nothing(tiny_bundle: Path, tmp_path: Path) -> None:
    with open_bundle(tiny_bundle, threads=1, alarms=False) as decoder:
        stream = decoder.stream()
        stream.feed(IDS[:5])
        poison(stream)
        stream.feed([1])
        poison(stream, 0.0)
        stream.rollback(1)
        stream.snapshot(tmp_path / "before")
    with open_bundle(tiny_bundle, threads=1) as decoder:
        restored = decoder.restore(tmp_path / "before")
        assert restored.alarm is None
        assert 0 <= restored.sample() < 97


def test_exploding_logits_stop_a_prompt_too(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = decoder.stream()
    prefill = decoder.backend.prefill
    calls = []

    def exploding(*arguments: object) -> np.ndarray:
        calls.append(1)
        return prefill(*arguments) * (1e9 if len(calls) == 2 else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder.backend, "prefill", exploding)
    with pytest.raises(NumericalError, match="beyond"):
        stream.feed(IDS, all_logits=True)
    assert len(calls) == 2, "what comes after the alarm is not computed"


def test_prometheus_reads_the_same_numbers(decoder: Decoder) -> None:
    from sinkring.runtime.prometheus import serve_metrics

    stream = decoder.stream()
    stream.feed(IDS[:30])
    stream.feed([1])
    port, close = serve_metrics(decoder, 0)
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        with pytest.raises(InputError, match="choose another port"):
            serve_metrics(decoder, port)
    finally:
        close()
    said = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(said['sinkring_position{row="0"}']) == 31
    assert float(said["sinkring_tokens_total"]) == 31
    assert float(said["sinkring_wraps_total"]) == decoder.metrics().wraps
    assert float(said["sinkring_cache_bytes"]) == decoder.cache_bytes
    assert float(said['sinkring_step_seconds{quantile="0.5"}']) > 0


def test_without_prometheus_client_the_message_says_what_to_install(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from sinkring.runtime.prometheus import serve_metrics

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(DependencyError, match=r"sinkring\[metrics\]"):
        serve_metrics(decoder, 0)
