"""Bundles whose graphs take embedded rows: the same streams, fed with rows, with tokens that the host embeds, and with both."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sinkring.exporter.export import export_decoder
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.embedding import EmbeddingTable
from sinkring.runtime.errors import BundleError, InputError
from sinkring.runtime.manifest import Codebooks, Embedding

from tests.models.tiny import tiny_llama
from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines
from tests.runtime.stream_case import IDS, Interrupted, V, assert_close, snapshot

HIDDEN = 32
HEARD = np.random.default_rng(8).standard_normal((len(IDS), HIDDEN)).astype(np.float32)


@pytest.fixture(scope="module")
def bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model of `tiny_bundle`, two rows, C = 16 and a slack of 3 at least."""
    out = tmp_path_factory.mktemp("embedded") / "bundle"
    export_decoder(tiny_model, out, sinks=2, window=4, chunk=4, batch=2, slack=3, inputs="embeddings")
    return out


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> Iterator[Decoder]:
    with open_bundle(bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def streams(decoder: Decoder) -> Iterator[tuple[Stream, Stream]]:
    with decoder.stream() as one, decoder.stream() as two:
        yield one, two


@pytest.fixture(scope="module")
def rows(decoder: Decoder) -> NDArray[np.float32]:
    """float32 [60,hidden]: what a speech model's step is given, a token and something heard."""
    return decoder.embed(IDS) + HEARD


def test_a_token_is_embedded_as_the_model_does_it(decoder: Decoder) -> None:
    table = tiny_llama().get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(decoder.embed(IDS), table[IDS])
    assert decoder.embed(IDS).dtype == np.float32


def test_tokens_and_their_rows_are_one(decoder: Decoder, streams: tuple[Stream, Stream], tiny_bundle: Path) -> None:
    """Past the third wrap: against a bundle that takes ids, and bit for bit against the rows of the same tokens."""
    one, two = streams
    fed = one.feed(IDS, all_logits=True)
    with open_bundle(tiny_bundle, threads=1) as plain, plain.stream() as stream:
        assert_close(fed, stream.feed(IDS, all_logits=True))
    embedded = decoder.embed(IDS)
    got = [two.feed_embeddings(embedded[start : start + 7], all_logits=True) for start in range(0, len(IDS), 7)]
    np.testing.assert_allclose(np.concatenate(got), fed, atol=1e-5, rtol=0)
    assert two.position == len(IDS)


def test_what_is_heard_counts(streams: tuple[Stream, Stream], rows: NDArray[np.float32]) -> None:
    one, two = streams
    assert np.abs(one.feed_embeddings(rows[:9]) - two.feed(IDS[:9])).max() > 0.1


def test_generated_tokens_are_embedded_and_go_before_what_is_fed_next(
    decoder: Decoder, streams: tuple[Stream, Stream], rows: NDArray[np.float32]
) -> None:
    one, two = streams
    one.feed_embeddings(rows[:9])
    said = list(one.generate(3, stop_ids=()))
    after = one.feed_embeddings(rows[9:12])
    assert_close(after, two.feed_embeddings(np.concatenate([rows[:9], decoder.embed(said), rows[9:12]])))
    assert one.position == two.position == 15
    assert one.extend(4).tolist() == list(two.generate(4, stop_ids=()))


def test_steps_take_tokens_and_rows_side_by_side(decoder: Decoder, streams: tuple[Stream, Stream], rows: NDArray[np.float32]) -> None:
    one, two = streams
    one.feed_embeddings(rows[:6])
    two.feed(IDS[:3])
    for at in range(24):
        logits = decoder.step({one: rows[6 + at], two: int(IDS[3 + at])})
    assert (one.position, two.position) == (30, 27)
    one.reset()
    two.reset()
    assert_close(logits[one], one.feed_embeddings(rows[:30]))
    assert_close(logits[two], two.feed(IDS[:27]))
    kept = snapshot(two)
    decoder.step({one: rows[30]})
    assert snapshot(two) == kept


def test_rollback_goes_back_to_rows_and_asks_for_the_next(streams: tuple[Stream, Stream], rows: NDArray[np.float32]) -> None:
    one, two = streams
    one.feed_embeddings(rows[:25])
    one.feed_embeddings(rows[40:42])
    one.rollback(2)
    with pytest.raises(InputError, match=r"^sample: after a rollback .* the last token is a row, which was not kept: feed something first"):
        one.sample()
    assert_close(one.feed_embeddings(rows[25:27]), two.feed_embeddings(rows[:27]))
    one.feed(IDS[:2])
    one.rollback(1)
    assert one.sample() == int(two.feed(IDS[:1]).argmax())


def test_an_interrupted_call_asks_for_the_next(decoder: Decoder, streams: tuple[Stream, Stream], rows: NDArray[np.float32]) -> None:
    one, two = streams
    whole = decoder.backend
    decoder.backend = Interrupted(whole, 4, after=False)  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            one.feed_embeddings(rows[:30])
    finally:
        decoder.backend = whole
    assert one.position == 12
    for call in (one.sample, lambda: one.extend(2), lambda: one.generate(1)):
        with pytest.raises(InputError, match=r"^(sample|extend|generate): after .* an interrupted call, the last token is a row"):
            call()
    one.rollback(1)
    assert_close(one.feed_embeddings(rows[11:30]), two.feed_embeddings(rows[:30]))
    assert one.sample() == two.sample()


def test_fork_and_snapshot_keep_the_gaps(
    decoder: Decoder, streams: tuple[Stream, Stream], rows: NDArray[np.float32], tmp_path: Path
) -> None:
    one, two = streams
    one.feed_embeddings(rows[:10])
    one.feed(IDS[10:13])
    one.snapshot(tmp_path / "one")
    two.close()
    with one.fork() as other:
        forked = list(other.generate(8, repetition_penalty=1.5, stop_ids=()))
    with decoder.restore(tmp_path / "one") as other:
        assert other.position == 13
        assert list(other.generate(8, repetition_penalty=1.5, stop_ids=())) == forked
    assert list(one.generate(8, repetition_penalty=1.5, stop_ids=())) == forked


def test_a_snapshot_is_of_its_kind_of_bundle(streams: tuple[Stream, Stream], tiny_model: Path, tmp_path: Path) -> None:
    export_decoder(tiny_model, tmp_path / "ids", sinks=2, window=4, chunk=4, batch=2, slack=3)
    streams[0].feed(IDS[:5])
    streams[0].snapshot(tmp_path / "one")
    with open_bundle(tmp_path / "ids") as plain, pytest.raises(BundleError, match="taken from another bundle"):
        plain.restore(tmp_path / "one")


_GOOD = np.zeros((3, HIDDEN), np.float32)
_NAN = np.where(np.arange(3)[:, None] == 1, np.float32(np.nan), _GOOD)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.zeros((3, HIDDEN)), "rows of dtype float64, expected float32"),
        (np.zeros((3, HIDDEN), np.int64), "token ids go to feed, or through Decoder.embed"),
        ([1, 2], "dtype int64"),
        (_GOOD[:, :-1], rf"shape \(3, {HIDDEN - 1}\), expected \(T, {HIDDEN}\)"),
        (_GOOD[0], rf"shape \({HIDDEN},\)"),
        (_GOOD[:0], r"with T of 1 or more"),
        (_NAN, "row 1 of 3 holds NaN or an infinity"),
        (_GOOD + np.float32(np.inf), "row 0 of 3 holds"),
        (None, "dtype object"),
        ([[1.0], [1.0, 2.0]], "that is no array"),
        ("text", "dtype <U4"),
    ],
)
def test_rows_that_are_none_are_refused_and_change_nothing(streams: tuple[Stream, Stream], wrong: Any, says: str) -> None:
    stream = streams[0]
    stream.feed(IDS[:6])
    kept = snapshot(stream)
    with pytest.raises(InputError, match=f"feed_embeddings: .*{says}"):
        stream.feed_embeddings(wrong)
    assert snapshot(stream) == kept


def test_a_step_refuses_a_wrong_row_before_any_stream_moves(decoder: Decoder, streams: tuple[Stream, Stream]) -> None:
    one, two = streams
    for wrong, says in ((_NAN[1], "row 0 of 1 holds"), (_GOOD[0, 1:], r"shape \(1, 31\)")):
        with pytest.raises(InputError, match=f"step: .*{says}"):
            decoder.step({one: 3, two: wrong})
    assert (one.position, two.position) == (0, 0)


def test_float16_rows_are_widened(streams: tuple[Stream, Stream], rows: NDArray[np.float32]) -> None:
    half = rows[:5].astype(np.float16)
    np.testing.assert_array_equal(streams[0].feed_embeddings(half), streams[1].feed_embeddings(half.astype(np.float32)))


def test_a_bundle_that_takes_ids_refuses_rows_by_name(tiny_bundle: Path) -> None:
    with open_bundle(tiny_bundle, threads=1) as plain, plain.stream() as stream:
        calls = {
            "feed_embeddings": lambda: stream.feed_embeddings(_GOOD),
            "embed": lambda: plain.embed([1]),
            "step": lambda: plain.step({stream: _GOOD[0]}),
        }
        for name, call in calls.items():
            with pytest.raises(InputError, match=f"{name}: the graphs of .* take token ids.*--inputs embeddings"):
                call()
        assert stream.position == 0


def test_a_damaged_table_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    table = np.load(copy / "embedding.npy")
    for damaged, says in ((table[:-1], "by the manifest"), (table.astype(np.float64), "is float64")):
        np.save(copy / "embedding.npy", damaged)
        with pytest.raises(BundleError, match=says):
            EmbeddingTable(copy, Embedding("embedding.npy", *table.shape, "float32"))
    (copy / "embedding.npy").write_bytes(b"no table")
    with pytest.raises(BundleError, match=r"embedding.npy: has 8 bytes"):
        open_bundle(copy)
    with pytest.raises(BundleError, match="is no NumPy file"):
        EmbeddingTable(copy, Embedding("embedding.npy", *table.shape, "float32"))


def test_codes_add_their_rows(tmp_path: Path) -> None:
    """Five tokens, two codebooks of three codes, and a last row for silence, which in some models is not zero."""
    table = np.arange(12 * 2, dtype=np.float32).reshape(12, 2)
    np.save(tmp_path / "embedding.npy", table)
    books = Codebooks(count=2, size=3, first=5, silence=11)
    embedding = EmbeddingTable(tmp_path, Embedding("embedding.npy", 12, 2, "float32", books))
    rows = embedding.embed([4, 0], np.array([[2, 0], [11, 1]]))
    np.testing.assert_array_equal(rows, [table[4] + table[5 + 2] + table[8 + 0], table[0] + table[11] + table[8 + 1]])
    np.testing.assert_array_equal(embedding.embed([4], None), [table[4] + 2 * table[11]])
    out = np.empty(2, np.float32)
    embedding.put_token(4, out)
    np.testing.assert_array_equal(out, table[4] + 2 * table[11])
    for codes, says in (([[3, 0]], r"code 3 is outside \[0, 3\)"), ([[0]], r"expected integers \(1, 2\)"), ([[0.0, 1.0]], "float64")):
        with pytest.raises(InputError, match=says):
            embedding.embed([4], codes)
    plain = EmbeddingTable(tmp_path, dataclasses.replace(Embedding("embedding.npy", 12, 2, "float32"), codebooks=None))
    with pytest.raises(InputError, match="this model has no codebooks"):
        plain.embed([4], [[0, 0]])
    with pytest.raises(InputError, match=r"outside the vocabulary \[0, 12\)"):
        plain.embed([12], None)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_engines_take_rows(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_graph: bool) -> None:
    """On the doubles, past the third wrap: chunks, and steps of two streams at different positions."""
    copy = with_engines(bundle, tmp_path / "engines")
    install_doubles(monkeypatch, CudaDouble())
    found = []
    for name, options in (("onnxruntime", {"target": "tensorrt-rtx", "threads": 1}), ("tensorrt-rtx", {"cuda_graph": cuda_graph})):
        with open_bundle(copy, name, **options) as opened:  # type: ignore[arg-type]
            heard = opened.embed(IDS) + HEARD
            one, two = opened.stream(), opened.stream()
            parts = [one.feed_embeddings(heard[:21], all_logits=True), two.feed(IDS[:2], all_logits=True)]
            for at in range(30):
                parts += [row[None] for row in opened.step({one: heard[21 + at], two: int(IDS[2 + at])}).values()]
            parts.append(two.extend(3).astype(np.float32)[:, None] * np.ones(V, np.float32))
            found.append(np.concatenate(parts))
    assert np.ptp(found[0]) > 1
    np.testing.assert_allclose(found[1], found[0], atol=1e-4, rtol=0)
