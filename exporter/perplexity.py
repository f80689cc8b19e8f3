"""measure_perplexity: how well a model predicts a long text under each way of keeping its past, side by side."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from sinkring.exporter.expected_logits import check_source
from sinkring.exporter.long_text import read_text
from sinkring.exporter.machine import Machine, describe_machine
from sinkring.exporter.perplexity_policies import ALL_POLICIES, POLICIES, Setup, open_policy
from sinkring.models.errors import ModelError
from sinkring.models.source import resolve_source
from sinkring.models.tokenizer import read_tokenizer
from sinkring.runtime.errors import InputError, UnsupportedError
from sinkring.runtime.manifest import MANIFEST_NAME, Manifest

PACKAGES = ("sinkring", "onnxruntime", "torch", "transformers", "numpy")
SINKS, WINDOW, STARTS, TOKENS = 4, 256, 8, 1280

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Estimate:
    """A mean over starts with its standard error: of log-perplexity in nats, or of a difference of two. starts: how many."""

    nats: float
    standard_error: float
    starts: int

    @property
    def factor(self) -> float:
        """exp of the mean: a perplexity, or the ratio of two."""
        return float(np.exp(self.nats))

    @property
    def factor_error(self) -> float:
        """The standard error of `factor`, to first order."""
        return self.factor * self.standard_error


@dataclass(frozen=True)
class Perplexity:
    """losses: nats float64 [starts, N] by policy, of the token after each position, NaN where it was not scored.

    first_scored: the position from which on a cache of S + W tokens is full; means are over the positions from there.
    """

    model: str
    text: str
    sinks: int
    window: int
    first_scored: int
    start_positions: tuple[int, ...]
    losses: dict[str, NDArray[np.float64]]
    machine: Machine
    versions: dict[str, str]

    @property
    def tokens(self) -> int:
        return next(iter(self.losses.values())).shape[1]

    @property
    def reference(self) -> str:
        """The policy that the others are held against."""
        return "streaming" if "streaming" in self.losses else next(iter(self.losses))

    def estimate(self, policy: str) -> Estimate:
        """Log-perplexity once the cache is full."""
        return _estimate(self.losses[policy][:, self.first_scored :])

    def compare(self, policy: str, other: str) -> Estimate:
        """How much higher the log-perplexity of `policy` is than that of `other`, on the positions that both have scored."""
        return _estimate((self.losses[policy] - self.losses[other])[:, self.first_scored :])

    def curve(self, policy: str, bins: int = 40) -> list[tuple[int, int, float, float]]:
        """(first position, one past the last, mean, standard error) of the log-perplexity; stretches without a score are left out."""
        edges = np.unique(np.linspace(0, self.tokens, bins + 1).astype(int))
        found = []
        for start, stop in pairwise(edges):
            block = self.losses[policy][:, start:stop]
            if np.isfinite(block).any(axis=1).all():
                estimate = _estimate(block)
                found.append((int(start), int(stop), estimate.nats, estimate.standard_error))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "text": self.text,
            "sinks_tokens": self.sinks,
            "window_tokens": self.window,
            "tokens": self.tokens,
            "first_scored": self.first_scored,
            "starts": list(self.start_positions),
            "reference": self.reference,
            "policies": {
                name: {**_shown(self.estimate(name)), "over_reference": _shown(self.compare(name, self.reference))} for name in self.losses
            },
            "machine": asdict(self.machine),
            "versions": self.versions,
        }


def measure_perplexity(
    source: str | Path,
    text: str,
    *,
    policies: Sequence[str] = POLICIES,
    sinks: int | None = None,
    window: int | None = None,
    starts: int = STARTS,
    tokens: int = TOKENS,
    chunk: int = 64,
    recompute_every: int = 64,
    bundles: str | Path = "bundles/perplexity",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Score `starts` pieces of `tokens` tokens, evenly spread over a text, under each of `policies` (see `perplexity_policies`).

    source: a bundle, whose model, sinks and window are then those that are measured, or a model, with sinks (default 4) and window (256).
    text: a UTF-8 file, "topics" or "kjv" (see `read_text`). bundles: folder where those configurations are kept that have to be exported.
    recompute_every: policy "recompute" scores one token in so many. progress is called with a policy, what is done, out of how much.

    Raises InputError, UnsupportedError, BundleError, GeometryError, DependencyError.
    """
    unknown = [name for name in policies if name not in ALL_POLICIES]
    if unknown or not policies:
        raise InputError(f"policies={list(policies)}: each must be one of {', '.join(ALL_POLICIES)}")
    for name, value in (("starts", starts), ("chunk", chunk), ("recompute_every", recompute_every)):
        if value < 1:
            raise InputError(f"{name}={value}: must be 1 or more")
    setup = _setup(str(source), sinks, window, Path(bundles), chunk, recompute_every, threads, progress)
    if tokens <= setup.cache_tokens:
        raise InputError(f"tokens={tokens}: must be more than sinks + window = {setup.cache_tokens}, or nothing ever leaves the cache")
    ids, front = _text_ids(setup.model, text)
    # The last of them is only predicted.
    length = tokens + 1 - len(front)
    if len(ids) < length:
        raise InputError(f"text {text!r} has {len(ids)} tokens, tokens={tokens} needs {length}; give a longer text or fewer tokens")
    positions = tuple(np.linspace(0, len(ids) - length, starts).astype(int).tolist())
    say: Progress = progress or (lambda stage, done, total: None)
    losses = {}
    try:
        for name in dict.fromkeys(policies):
            with open_policy(name, setup) as score:
                rows = []
                for done, start in enumerate(positions):
                    say(name, done, starts)
                    rows.append(score(np.concatenate([front, ids[start : start + length]])))
                say(name, starts, starts)
                losses[name] = np.stack(rows)
    except ModelError as error:
        raise UnsupportedError(f"{source}: {error}") from None
    return Perplexity(
        model=setup.model,
        text=text,
        sinks=setup.sinks,
        window=setup.window,
        first_scored=setup.cache_tokens - 1,
        start_positions=positions,
        losses=losses,
        machine=describe_machine(),
        versions={package: version(package) for package in PACKAGES},
    )


def _setup(
    source: str,
    sinks: int | None,
    window: int | None,
    bundles: Path,
    chunk: int,
    recompute_every: int,
    threads: int | None,
    progress: Progress | None,
) -> Setup:
    def say(line: str) -> None:
        if progress:
            progress(line, 0, 1)
            progress(line, 1, 1)

    if not (Path(source) / MANIFEST_NAME).is_file():
        try:
            resolve_source(source)
        except ModelError as error:
            raise InputError(f"{source}: neither a bundle nor a model: {error}") from None
        sizes = (SINKS if sinks is None else sinks, WINDOW if window is None else window)
        return Setup(source, *sizes, bundles, None, chunk, recompute_every, threads, say)
    if sinks is not None or window is not None:
        raise InputError(f"{source}: is a bundle, which has its own sinks and window; leave --sinks and --window out, or give the model")
    manifest = Manifest.read(Path(source))
    geometry = manifest.rings[0].geometry
    if len(manifest.rings) != 1 or not geometry.wraps:
        raise UnsupportedError(f"{source}: has no single ring whose sinks and window the policies could share; give the model instead")
    chunk, model = min(chunk, manifest.chunk), manifest.model.source
    check_source(source, manifest, model)
    return Setup(
        model,
        geometry.sinks_tokens,
        geometry.window_tokens,
        bundles,
        (Path(source), manifest.policy if geometry.sinks_tokens else "window"),
        chunk,
        recompute_every,
        threads,
        say,
    )


def _text_ids(model: str, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of the whole text, and what the model's tokenizer puts in front of any: a BOS or nothing."""
    try:
        found = read_tokenizer(resolve_source(model).path)
    except ModelError as error:
        raise UnsupportedError(f"{model}: {error}") from None
    if found is None:
        raise InputError(f"{model}: has no tokenizer, so no text can be scored; give a model that has one")
    tokenizer = tokenizers.Tokenizer.from_str(found.json)
    whole, front = tokenizer.encode(read_text(text), add_special_tokens=False), tokenizer.encode("")
    return np.array(whole.ids, np.int64), np.array(front.ids, np.int64)


def _estimate(values: NDArray[np.float64]) -> Estimate:
    """values [starts, N], NaN where there is none: mean over each start's mean, and how far those are apart."""
    means = np.nanmean(values, axis=1)
    error = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")
    return Estimate(float(means.mean()), error, len(means))


def _shown(estimate: Estimate) -> dict[str, float]:
    error = estimate.standard_error
    # JSON has no NaN: of one start there is no error.
    return {"nats": estimate.nats, "factor": estimate.factor, **({} if np.isnan(error) else {"standard_error_nats": error})}
