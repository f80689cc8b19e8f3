"""What a bundle's logits must be, by the oracle, and what they must not be: the oracle with an attended set that is off by one token."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sinkring.models.errors import ModelError, SourceError
from sinkring.models.oracle import attended, masked_dense_logits, streaming_logits, top2_margin
from sinkring.models.patch import rotary_at_length, rotary_module
from sinkring.models.registry import find_family
from sinkring.models.source import load_model, resolve_source
from sinkring.runtime.errors import BundleError, UnsupportedError
from sinkring.runtime.manifest import Manifest, Policy

# Steps that a control is compared over, counted from the first one whose attended set it gets wrong.
CONTROL_STEPS = 32

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Wrong:
    """Logits float32 [n, V] of positions first .. first+n-1 with a wrong geometry. name says what is wrong."""

    name: str
    first: int
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class Expected:
    """logits float32 [N, V]; margins float32 [N], the best token's lead; scale: the largest |logit|; wrong: the controls.

    inv_freq float32 [R/2]: the model's own rotary frequencies for a sequence of S + W tokens, radians per token.
    """

    logits: NDArray[np.float32]
    margins: NDArray[np.float32]
    scale: float
    wrong: tuple[Wrong, ...]
    source: str
    inv_freq: NDArray[np.float32]


def compute_expected(
    bundle: str, manifest: Manifest, sinks: int, window: int, ids: NDArray[np.int64], model: str | None, progress: Progress
) -> Expected:
    """Load the bundle's model (`model`, or the manifest's source) and run the oracle over ids int64 [N]. The model is freed on return.

    Raises BundleError if the source is missing or is not what the bundle was exported from, UnsupportedError for what the oracle refuses.
    """
    source = model or manifest.model.source
    check_source(bundle, manifest, source)
    progress("loading the model", 0, 1)
    try:
        network = load_model(source).model
        progress("loading the model", 1, 1)
        with _layer_progress(network, len(ids), "oracle", progress):
            logits = _logits(manifest.policy, network, ids, sinks, window)
        wrong = []
        for name, other_sinks, other_window in wrong_geometries(sinks, window):
            first = _first_difference(len(ids), (sinks, window), (other_sinks, other_window))
            if first is None:
                continue
            stop = min(len(ids), first + CONTROL_STEPS)
            with _layer_progress(network, stop, f"control: {name}", progress):
                rows = _logits(manifest.policy, network, ids[:stop], other_sinks, other_window)[first:]
            wrong.append(Wrong(name, first, rows.numpy().copy()))
        inv_freq = _inv_freq(network, sinks + window)
    except ModelError as error:
        raise UnsupportedError(f"{bundle}: the oracle cannot run: {error}") from None
    del network
    gc.collect()
    margins = top2_margin(logits).numpy()
    return Expected(logits.numpy(), margins, float(logits.abs().max()), tuple(wrong), source, inv_freq)


def _inv_freq(network: Any, length: int) -> NDArray[np.float32]:
    frequencies = rotary_at_length(rotary_module(network), length).inv_freq
    assert isinstance(frequencies, torch.Tensor), "rotary_module has checked it"
    return frequencies.detach().float().numpy().copy()


def wrong_geometries(sinks: int, window: int) -> tuple[tuple[str, int, int], ...]:
    """(name, S, W) of the smallest mistakes: a window off by one token, and the last sink missing."""
    # A window of 1 cannot be shorter.
    short = (f"window {window - 1}", sinks, window - 1) if window > 1 else (f"window {window + 1}", sinks, window + 1)
    return (short, (f"sinks {sinks - 1}", sinks - 1, window)) if sinks else (short,)


def _first_difference(steps: int, right: tuple[int, int], wrong: tuple[int, int]) -> int | None:
    """First position below `steps` whose query attends to other tokens under the two geometries (S, W); None if there is none."""
    # Both see all tokens before the smaller S + W - 1.
    start = min(sinks + window for sinks, window in (right, wrong)) - 1
    return next((query for query in range(start, steps) if attended(query, *right) != attended(query, *wrong)), None)


def _logits(policy: Policy, network: Any, ids: NDArray[np.int64], sinks: int, window: int) -> torch.Tensor:
    oracle = streaming_logits if policy == "streaming" else masked_dense_logits
    return oracle(network, torch.from_numpy(ids), sinks, window)


def check_source(bundle: str, manifest: Manifest, source: str) -> None:
    """The oracle must read the very weights that were exported: other weights of the same shape would only look like a broken bundle."""
    try:
        found = resolve_source(source).sha256()
    except SourceError as error:
        raise BundleError(f"{bundle}: the model it was made from is not there: {error}; give that model with --model") from None
    wanted = manifest.model.source_sha256
    if found != wanted:
        raise BundleError(
            f"{bundle}: was exported from a model with sha256 {wanted[:12]}..., {source} has {found[:12]}...; "
            "give the model that was exported with --model, or export again"
        )


@contextmanager
def _layer_progress(network: Any, tokens: int, stage: str, progress: Progress) -> Iterator[None]:
    """Report each decoder layer of the pass over `tokens` tokens; shorter passes are the oracle's own checks."""
    layers = list(attrgetter(find_family(network.config).layers)(network))

    def report(number: int) -> Callable[[Any, Any, Any], None]:
        def hook(_layer: Any, inputs: Any, _output: Any) -> None:
            if inputs and inputs[0].shape[1] == tokens:
                progress(stage, number, len(layers))

        return hook

    progress(stage, 0, len(layers))
    handles = [layer.register_forward_hook(report(number)) for number, layer in enumerate(layers, start=1)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
