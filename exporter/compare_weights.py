"""compare_weights: what weights in another format cost in quality, next to the bytes they save."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from sinkring.exporter.divergence import Divergence
from sinkring.exporter.machine import Machine, describe_machine
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.exporter.token_loss import token_loss
from sinkring.runtime.decoder import open_bundle
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest

PACKAGES = ("sinkring", "onnxruntime", "numpy")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Quality:
    """One bundle on the text. weight_bytes: of its weights file. nats: mean loss of a token; perplexity is e to that power.

    kl, top1: mean KL(reference || bundle) in nats, and the share of positions with the reference's best token.
    """

    bundle: str
    weights: str
    weight_bytes: int
    nats: float
    kl: float
    top1: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nats))


@dataclass(frozen=True)
class WeightComparison:
    """reference, compared: the two bundles. text: where the `tokens` ids come from; each but the first is predicted."""

    reference: Quality
    compared: Quality
    text: str
    tokens: int
    machine: Machine
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        sides = {
            name: {**asdict(side), "perplexity": side.perplexity}
            for name, side in (("reference", self.reference), ("compared", self.compared))
        }
        return {
            **sides,
            "perplexity_ratio": self.compared.perplexity / self.reference.perplexity,
            "bytes_saved": self.reference.weight_bytes - self.compared.weight_bytes,
            "text": self.text,
            "tokens": self.tokens,
            "machine": asdict(self.machine),
            "versions": self.versions,
        }


def compare_weights(
    bundle: str | Path, against: str | Path, *, tokens: int = 2048, threads: int | None = None, progress: Progress | None = None
) -> WeightComparison:
    """Score one text with two bundles of one model and geometry, through the runtime as it runs them, in chunks.

    bundle: the one in question; against: the reference, as a rule the fp32 one. tokens: of Python's help topics, 2 or more.
    Raises InputError for bundles of different models, policies or caches; BundleError, DependencyError.
    """
    if tokens < 2:
        raise InputError(f"tokens={tokens}: must be 2 or more, so that one is predicted")
    paths = Path(against), Path(bundle)
    manifests = [Manifest.read(path) for path in paths]
    _check_same(paths, manifests)
    reference = read_reference_ids(paths[0], manifests[0], tokens)
    ids = reference.ids
    chunk = min(manifest.chunk for manifest in manifests)
    losses: list[list[np.ndarray]] = [[], []]
    kl, agrees = [], []
    say: Progress = progress or (lambda stage, done, total: None)
    with open_bundle(paths[0], threads=threads) as first, open_bundle(paths[1], threads=threads) as second:
        streams = first.stream(), second.stream()
        # The last of the text is only predicted.
        for start in range(0, tokens - 1, chunk):
            piece, targets = ids[start : start + chunk][: tokens - 1 - start], ids[start + 1 : start + 1 + chunk]
            expected, found = (stream.feed(piece, all_logits=True) for stream in streams)
            for logits, kept in ((expected, losses[0]), (found, losses[1])):
                kept.append(token_loss(logits, targets))
            apart = Divergence(expected)
            apart.add(0, found)
            kl.append(apart.kl)
            agrees.append(apart.agrees)
            say("scoring", start + len(piece), tokens - 1)
    means = [float(np.concatenate(side).mean()) for side in losses]
    figures = ((0.0, 1.0), (float(np.concatenate(kl).mean()), float(np.concatenate(agrees).mean())))
    sides = [
        Quality(str(path), manifest.weights.format, manifest.model.weight_bytes, nats, *figure)
        for path, manifest, nats, figure in zip(paths, manifests, means, figures, strict=True)
    ]
    return WeightComparison(
        sides[0], sides[1], reference.origin, tokens, describe_machine(), {package: version(package) for package in PACKAGES}
    )


def _check_same(paths: tuple[Path, Path], manifests: list[Manifest]) -> None:
    """Only the weights may differ: anything else would show as if it were theirs."""
    first, second = manifests
    for what, one, other in (
        ("model (sha256)", first.model.source_sha256, second.model.source_sha256),
        ("policy", first.policy, second.policy),
        ("sinks and windows", [_reach(ring) for ring in first.rings], [_reach(ring) for ring in second.rings]),
    ):
        if one != other:
            raise InputError(f"{paths[0]} and {paths[1]} differ in their {what}: {one}, {other}; export both from one model, alike")


def _reach(ring: Any) -> tuple[int, int, bool]:
    return ring.geometry.sinks_tokens, ring.geometry.window_tokens, ring.geometry.wraps
