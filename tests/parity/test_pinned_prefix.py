"""Sinks as a pinned prefix (a system prompt of hundreds of tokens), none at all, one, and a window of the current token alone."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sinkring.exporter.export import export_decoder
from sinkring.runtime.manifest import Policy

from tests.models.tiny import tiny_llama
from tests.parity.closeness import assert_loudly_wrong, assert_parity
from tests.parity.tiny_bundles import TARGETS, Export, TinyBundle, feed_in_cuts, text

POLICIES: tuple[Policy, ...] = ("native", "streaming")
# No sinks under the native policy and one under the streaming policy are in tiny_bundles.py.
EXPORTS = {
    "300 sinks native": Export("long", "native", sinks=300, window=40, chunk=16),
    "300 sinks streaming": Export("long", "streaming", sinks=300, window=40, chunk=16),
    "no sinks streaming": Export("long", "streaming", sinks=0, window=7, chunk=4),
    "one sink native": Export("long", "native", sinks=1, window=7, chunk=4),
    "window of one native": Export("long", "native", sinks=0, window=1, chunk=1),
    "window of one streaming": Export("long", "streaming", sinks=2, window=1, chunk=4),
}
every_bundle = pytest.mark.parametrize("name", EXPORTS)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], TinyBundle]]:
    """Made when first asked for. The model is trained for 1024 tokens, so that 300 sinks and a window are within what it knows."""
    folder = tmp_path_factory.mktemp("pinned")
    model = tiny_llama(seed=3, max_position_embeddings=1024)
    model.save_pretrained(folder / "model")

    @cache
    def get(name: str) -> TinyBundle:
        export = EXPORTS[name]
        manifest = export_decoder(
            folder / "model",
            folder / name,
            policy=export.policy,
            sinks=export.sinks,
            window=export.window,
            chunk=export.chunk,
            targets=TARGETS,
        )
        made.append(TinyBundle(Path(folder / name), export, model, manifest.rings[0].geometry))
        return made[-1]

    made: list[TinyBundle] = []
    yield get
    for bundle in made:
        bundle.close()


@cache
def expected_of(bundle_of: Callable[[str], TinyBundle], name: str) -> np.ndarray:
    bundle = bundle_of(name)
    return bundle.oracle(text(bundle.wrapped_thrice, seed=20))


@every_bundle
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cuts", [(1000,), (1,), (300, 1, 5, 2)], ids=["whole", "tokens", "mixed"])
def test_logits_are_those_of_the_oracle(bundles: Callable[[str], TinyBundle], name: str, target: str, cuts: tuple[int, ...]) -> None:
    bundle = bundles(name)
    got = feed_in_cuts(bundle.decoder(target), text(bundle.wrapped_thrice, seed=20), cuts)
    assert_parity(got, expected_of(bundles, name), what=f"{name}, {target}, cuts {cuts}")


@every_bundle
def test_controls_are_seen(bundles: Callable[[str], TinyBundle], name: str) -> None:
    bundle = bundles(name)
    export, ids, expected = bundle.export, text(bundle.wrapped_thrice, seed=20), expected_of(bundles, name)
    assert_loudly_wrong(expected, bundle.oracle(ids, window=export.window + 1), "a window one longer")
    if export.window > 1:
        assert_loudly_wrong(expected, bundle.oracle(ids, window=export.window - 1), "a window one shorter")
    if export.sinks:
        assert_loudly_wrong(expected, bundle.oracle(ids, sinks=export.sinks - 1), "a missing sink")
    else:
        assert_loudly_wrong(expected, bundle.oracle(ids, sinks=1), "a sink too many")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_is_shared_by_forks_and_survives_rollbacks(bundles: Callable[[str], TinyBundle], policy: str, tmp_path: Path) -> None:
    """The prompt is read once, saved, and taken back to again and again; each time what follows is as the oracle has it."""
    bundle = bundles(f"300 sinks {policy}")
    decoder, prefix = bundle.decoder(), text(300, seed=21)
    with decoder.stream() as stream:
        stream.feed(prefix)
        stream.snapshot(tmp_path / "prefix")
    for seed, length in ((22, 50), (23, 200)):
        rest = text(length, seed=seed)
        expected = bundle.oracle(np.concatenate([prefix, rest]))[300:]
        with decoder.restore(tmp_path / "prefix") as stream:
            # Up to the wrap everything can be taken back, some of the pinned tokens too.
            stream.feed(text(60, seed=24))
            stream.rollback(70)
            stream.feed(prefix[290:])
            assert_parity(stream.feed(rest, all_logits=True), expected, what=f"{length} tokens after the prefix")
