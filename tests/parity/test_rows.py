"""Rows of one bundle: neighbours do not touch each other, a reset forgets everything, and every slot that may count does."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import TARGETS, TinyBundle, feed_in_cuts, text

Bundles = Callable[[str], TinyBundle]
every_target = pytest.mark.parametrize("target", TARGETS)


@every_target
def test_two_streams_equal_their_solo_runs(parity_bundle: Bundles, target: str) -> None:
    bundle = parity_bundle("two rows")
    decoder, tokens = bundle.decoder(target), bundle.wrapped_thrice
    texts = [text(tokens, seed=6), text(tokens, seed=7)]
    cuts = [3, 1, 1, 4, 2]
    solo = [feed_in_cuts(decoder, ids, cuts) for ids in texts]
    parts: list[list[np.ndarray]] = [[], []]
    with decoder.stream() as one, decoder.stream() as two:
        assert {one.row, two.row} == {0, 1}
        # The second row joins late, so that the rows are never at the same position.
        starts = [0, 0]
        for turn in range(4 * tokens):
            row = turn % 2
            length = cuts[len(parts[row]) % len(cuts)]
            if (row == 1 and turn < 5) or starts[row] >= tokens:
                continue
            parts[row].append((one, two)[row].feed(texts[row][starts[row] : starts[row] + length], all_logits=True))
            starts[row] += length
    for ids, alone, together in zip(texts, solo, parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(together), alone)
        assert_parity(alone, bundle.oracle(ids))


@every_target
def test_the_decode_graph_steps_rows_at_different_positions(parity_bundle: Bundles, target: str) -> None:
    bundle = parity_bundle("two rows")
    decoder, tokens = bundle.decoder(target), bundle.wrapped_thrice
    backend, ahead = decoder.backend, 5
    texts = [text(tokens, seed=8), text(tokens, seed=9)]
    expected = [bundle.oracle(ids) for ids in texts]
    with decoder.stream() as one, decoder.stream() as two:
        (one if one.row == 0 else two).feed(texts[0][:ahead])
        for step in range(tokens - ahead):
            at = (step + ahead, step)
            for row, position in enumerate(at):
                backend.input[row, 0], backend.position[row] = texts[row][position], position
                backend.write_index[0][row] = bundle.geometry.slot(position)
            backend.decode()
            for row, position in enumerate(at):
                assert_parity(backend.logits[row, 0], expected[row][position], what=f"row {row}, step {step}")


@every_target
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("name", ["chunk 4 streaming", "two rows"])
def test_a_reset_row_equals_a_fresh_one(parity_bundle: Bundles, name: str, target: str, poison: float) -> None:
    bundle = parity_bundle(name)
    decoder, ids = bundle.decoder(target), text(bundle.wrapped_thrice, seed=10)
    with decoder.stream() as stream:
        fresh = stream.feed(ids, all_logits=True)
        row = stream.row
        decoder.backend.write_row(row, {name: np.full_like(state, poison) for name, state in decoder.backend.read_row(row).items()})
        stream.reset()
        assert stream.position == 0
        np.testing.assert_array_equal(stream.feed(ids, all_logits=True), fresh)
        decoder.backend.write_row(row, {name: np.full_like(state, poison) for name, state in decoder.backend.read_row(row).items()})
    with decoder.stream() as stream:
        assert bundle.export.batch > 1 or stream.row == row
        np.testing.assert_array_equal(stream.feed(ids, all_logits=True), fresh)
    assert_parity(fresh, bundle.oracle(ids))


@every_target
@pytest.mark.parametrize("name", ["chunk 4 native", "chunk 4 streaming", "no sinks"])
@pytest.mark.parametrize("tokens", [1, 3], ids=["step", "chunk"])
def test_every_attended_slot_counts_and_no_other(parity_bundle: Bundles, name: str, target: str, tokens: int) -> None:
    """Change one slot of one state at a time: the logits move if and only if the slot holds a token that a query attends to."""
    bundle = parity_bundle(name)
    geometry, decoder = bundle.geometry, bundle.decoder(target)
    backend, fed = decoder.backend, geometry.capacity + geometry.sinks_tokens + 2
    ids = text(fed + tokens, seed=11)
    assert geometry.room(fed) >= tokens
    with decoder.stream() as stream:
        stream.feed(ids[:fed])
        state = backend.read_row(stream.row)

        def logits() -> np.ndarray:
            stream._fed = fed
            return stream.feed(ids[fed:], all_logits=True)

        right = logits()
        new = {geometry.slot(fed + index) for index in range(tokens)}
        live = {geometry.slot(token) for index in range(tokens) for token in geometry.attended(fed + index)} - new
        for changed in state:
            for slot in range(geometry.capacity):
                other = {name: ring.copy() for name, ring in state.items()}
                other[changed][:, :, slot] += 3.0
                backend.write_row(stream.row, other)
                wrong = logits()
                if slot in live:
                    assert_loudly_wrong(wrong, right, f"slot {slot} of {changed}", times=1)
                else:
                    np.testing.assert_array_equal(wrong, right, err_msg=f"slot {slot} of {changed} must not count")
