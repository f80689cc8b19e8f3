"""Invariant I7: a stream that took tokens back gives the logits of one that was never fed them, by the oracle."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import TARGETS, TinyBundle, text

Bundles = Callable[[str], TinyBundle]
# Slack 6, 6, 8, 3, 0 and 2.
NAMES = ("chunk 4 native", "chunk 4 streaming", "chunk 8 streaming", "no sinks", "tight streaming", "two rows")
every_target = pytest.mark.parametrize("target", TARGETS)


def furthest(bundle: TinyBundle, position: int) -> int:
    """Tokens that can be taken back at `position`, by the ring's own definition of what it holds."""
    return position if position <= bundle.geometry.capacity else bundle.geometry.slots - bundle.export.window


@every_target
@pytest.mark.parametrize("name", NAMES)
def test_before_across_and_after_a_wrap(parity_bundle: Bundles, name: str, target: str) -> None:
    """From every position up to the third wrap, by 1, by the most and by one less; the rest is fed whole, so that chunks meet the wrap."""
    bundle = parity_bundle(name)
    decoder, tokens = bundle.decoder(target), bundle.wrapped_thrice
    ids, junk = text(tokens + 6, seed=12), text(tokens, seed=13)
    expected = bundle.oracle(ids)
    worst = 0
    for position in range(1, tokens):
        most = furthest(bundle, position)
        for back in sorted({1, most - 1, most} & set(range(1, most + 1))):
            kept = position - back
            with decoder.stream() as stream:
                if kept:
                    stream.feed(ids[:kept])
                stream.feed(junk[:back])
                stream.rollback(back)
                assert stream.position == kept
                got = stream.feed(ids[kept:], all_logits=True)
            assert_parity(got, expected[kept:], what=f"{back} tokens taken back at {position}")
            worst = max(worst, back)
    assert worst > 0


@every_target
@pytest.mark.parametrize("name", NAMES)
def test_the_last_logits_are_made_anew(parity_bundle: Bundles, name: str, target: str) -> None:
    """`sample` and `step` after the furthest rollback that leads to each position, with nothing fed in between."""
    bundle = parity_bundle(name)
    decoder, tokens = bundle.decoder(target), bundle.wrapped_thrice
    ids, junk = text(tokens, seed=14), text(tokens, seed=15)
    expected = bundle.oracle(ids)
    for kept in range(1, tokens - 1):
        back = max(n for n in range(tokens) if n <= furthest(bundle, kept + n))
        if not back:
            continue
        with decoder.stream() as stream:
            stream.feed(ids[:kept])
            stream.feed(junk[:back])
            stream.rollback(back)
            stream.sample()
            assert_parity(stream._logits, expected[kept - 1], what=f"sample at {kept} after {back} taken back")
            assert_parity(stream.feed(ids[kept : kept + 1]), expected[kept], what=f"feed at {kept} after {back} taken back")
            if back > 1:
                stream.feed(junk[: back - 1])
            stream.rollback(back)
            stepped = decoder.step({stream: int(ids[kept])})[stream]
            assert_parity(stepped, expected[kept], what=f"step at {kept} after {back} taken back twice")


@every_target
@pytest.mark.parametrize("name", NAMES)
def test_drafts_rejected_again_and_again(parity_bundle: Bundles, name: str, target: str) -> None:
    """Speculative decoding: a draft is fed, all or part of it taken back, the right tokens fed; for five windows and more."""
    bundle = parity_bundle(name)
    rng, tokens = np.random.default_rng(16), 2 * bundle.wrapped_thrice
    slack = bundle.geometry.slots - bundle.export.window
    ids = text(tokens, seed=17)
    expected, got = bundle.oracle(ids), []
    with bundle.decoder(target).stream() as stream:
        while stream.position < tokens:
            kept = stream.position
            right = int(min(rng.integers(0, slack + 1), tokens - kept - 1))
            wrong = int(rng.integers(0, slack - right + 1))
            draft = np.concatenate([ids[kept : kept + right], rng.integers(0, 97, wrong)])
            if len(draft):
                got.extend(stream.feed(draft, all_logits=True)[:right])
                for part in (wrong // 2, wrong - wrong // 2):
                    stream.rollback(part)
            got.append(stream.feed(ids[kept + right : kept + right + 1]))
    assert_parity(np.array(got), expected)


def test_controls_are_seen(parity_bundle: Bundles) -> None:
    """A rollback that forgets to move the position, and one further than the slack, both by reaching past the checks, are loud."""
    bundle = parity_bundle("chunk 4 streaming")
    tokens, slack = bundle.wrapped_thrice, bundle.geometry.slack
    ids, junk = text(tokens, seed=18), text(tokens, seed=19)
    kept = 2 * bundle.geometry.capacity
    expected = bundle.oracle(ids)[kept:]
    with bundle.decoder().stream() as stream:
        stream.feed(ids[:kept])
        stream.feed(junk[:3])
        assert_loudly_wrong(stream.feed(ids[kept:], all_logits=True), expected, "junk that was not taken back")
        stream.reset()
        stream.feed(ids[:kept])
        stream.feed(junk[: slack + 2])
        stream._fed = kept
        assert_loudly_wrong(stream.feed(ids[kept:], all_logits=True), expected, "two tokens more than the slack", times=10)
