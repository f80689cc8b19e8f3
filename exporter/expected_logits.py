"""What a bundle's logits must be, by the oracle, and what they must not be: the oracle with an attended set that is off by one token."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sinkring.exporter.geometries import full_attention_geometry
from sinkring.exporter.stored_weights import Moved, put_stored_weights
from sinkring.models.alibi import alibi_slopes
from sinkring.models.anatomy import longest_reach, read_layers, trained_window_replaced, trained_windows
from sinkring.models.errors import ModelError, SourceError
from sinkring.models.oracle import attended, masked_dense_logits, streaming_logits, top2_margin
from sinkring.models.registry import find_family
from sinkring.models.source import load_model, resolve_source
from sinkring.runtime.errors import BundleError, UnsupportedError
from sinkring.runtime.manifest import Manifest, Policy

# Steps that a control is compared over, counted from the first one whose attended set it gets wrong.
CONTROL_STEPS = 32
# The dtypes of a manifest whose weights are rounded.
NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Wrong:
    """Logits float32 [n, V] of positions first .. first+n-1 with a wrong geometry. name says what is wrong."""

    name: str
    first: int
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class KeyTurn:
    """inv_freq float32 [R/2]: radians per token, of the first R entries. interleaved: 2i turns with 2i + 1, else i with i + R/2."""

    inv_freq: NDArray[np.float32]
    interleaved: bool


@dataclass(frozen=True)
class Expected:
    """logits float32 [N, V]; margins float32 [N], the best token's lead; scale: the largest |logit|; wrong: the controls.

    turns: how each layer's keys turn with their position, None for a layer whose keys do not. trained_window: tokens, of the layers with a
    sliding window, None for a model without. alibi: whether scores fall with distance instead.
    moved: see `put_stored_weights`; empty for the model's own weights.
    """

    logits: NDArray[np.float32]
    margins: NDArray[np.float32]
    scale: float
    wrong: tuple[Wrong, ...]
    source: str
    turns: tuple[KeyTurn | None, ...]
    trained_window: int | None
    alibi: bool
    moved: dict[str, Moved] = field(default_factory=dict)


@dataclass(frozen=True)
class _Streamed:
    """What the oracle is asked for. sinks, window: of the layers with full attention, if there are any (`full`). trained: the window of
    the model's other layers, None if it has none.
    """

    sinks: int
    window: int
    full: bool
    trained: int | None


def compute_expected(
    bundle: str,
    manifest: Manifest,
    ids: NDArray[np.int64],
    model: str | None,
    progress: Progress,
    *,
    stored: bool = False,
    rounded: bool = True,
) -> Expected:
    """Load the bundle's model (`model`, or the manifest's source) and run the oracle over ids int64 [N]. The model is freed on return.

    Sinks and window are the manifest's for the layers that were trained with full attention, where a linear cache is a window of N tokens;
    the other layers' windows are the model's. stored: with the weights that the bundle stores in place of the model's. rounded: with
    weights of the bundle's dtype, else with those of float32.

    Raises BundleError if the source is missing or is not what the bundle was exported from, UnsupportedError for what the oracle refuses.
    """
    source = model or manifest.model.source
    check_source(bundle, manifest, source)
    progress("loading the model", 0, 1)
    try:
        network = load_model(source).model
        if rounded and (narrow := NARROW.get(manifest.dtype)) is not None:
            # The graph's own weights: what is proven is what it computes with them, not what rounding them cost.
            for weight in network.parameters():
                weight.data = weight.data.to(narrow).float()
        moved = put_stored_weights(network, Path(bundle), manifest) if stored else {}
        progress("loading the model", 1, 1)
        right = _asked(bundle, manifest, network, len(ids))
        with _layer_progress(network, len(ids), "oracle", progress):
            logits = _logits(manifest.policy, network, ids, right)
        wrong = []
        for name, other in _wrong_ones(right):
            first = _first_difference(len(ids), right, other)
            if first is None:
                continue
            stop = min(len(ids), first + CONTROL_STEPS)
            with _layer_progress(network, stop, f"control: {name}", progress):
                rows = _logits(manifest.policy, network, ids[:stop], other)[first:]
            wrong.append(Wrong(name, first, rows.numpy().copy()))
        turns = _turns(network, right.sinks, right.window)
        alibi = alibi_slopes(network) is not None
    except ModelError as error:
        raise UnsupportedError(f"{bundle}: the oracle cannot run: {error}") from None
    del network
    gc.collect()
    margins = top2_margin(logits).numpy()
    return Expected(logits.numpy(), margins, float(logits.abs().max()), tuple(wrong), source, turns, right.trained, alibi, moved)


def compute_eager(bundle: str, manifest: Manifest, ids: NDArray[np.int64], model: str | None, progress: Progress) -> NDArray[np.float32]:
    """Logits float32 [N, V] of eager PyTorch in the bundle's own dtype, which must be one of 16 bits: what rounding costs there."""
    source = model or manifest.model.source
    check_source(bundle, manifest, source)
    try:
        network = load_model(source).model
        right = _asked(bundle, manifest, network, len(ids))
        with _layer_progress(network, len(ids), f"eager PyTorch in {manifest.dtype}", progress):
            oracle = streaming_logits if manifest.policy == "streaming" else masked_dense_logits
            trained = nullcontext() if right.trained is None else trained_window_replaced(network, right.trained)
            with trained:
                logits = oracle(network, torch.from_numpy(ids), right.sinks, right.window, narrow=NARROW[manifest.dtype])
    except ModelError as error:
        raise UnsupportedError(f"{bundle}: eager PyTorch cannot run it in {manifest.dtype}: {error}") from None
    return logits.float().numpy()


def _asked(bundle: str, manifest: Manifest, network: Any, steps: int) -> _Streamed:
    windows = trained_windows(network)
    trained = next((window for window in windows if window is not None), None)
    full = full_attention_geometry(bundle, manifest, windows)
    if full is None:
        return _Streamed(0, steps, False, trained)
    # Of a linear cache the run sees as much as it has tokens, so that a window shorter by one is a control.
    return _Streamed(full.sinks_tokens, full.window_tokens if full.wraps else steps, True, trained)


def _turns(network: Any, sinks: int, window: int) -> tuple[KeyTurn | None, ...]:
    layers = read_layers(network)
    turns: list[KeyTurn | None] = []
    for layer in layers:
        if layer.rotation is None:
            turns.append(None)
            continue
        length = longest_reach(layers, layer.rotation.angles, sinks, window)
        inv_freq = layer.rotation.angles.at_length(length)[0].detach().float().numpy().copy()
        turns.append(KeyTurn(inv_freq, layer.rotation.interleaved))
    return tuple(turns)


def _wrong_ones(right: _Streamed) -> list[tuple[str, _Streamed]]:
    """What the controls ask for: mistakes in one kind of layer, each of the kinds that the model has."""
    geometries = wrong_geometries(right.sinks, right.window) if right.full else ()
    wrong = [(name, replace(right, sinks=sinks, window=window)) for name, sinks, window in geometries]
    if right.trained is not None:
        other = right.trained - 1 if right.trained > 1 else 2
        wrong.append((f"sliding window {other}", replace(right, trained=other)))
    return wrong


def wrong_geometries(sinks: int, window: int) -> tuple[tuple[str, int, int], ...]:
    """(name, S, W) of the smallest mistakes: a window off by one token, and the last sink missing."""
    # A window of 1 cannot be shorter.
    short = (f"window {window - 1}", sinks, window - 1) if window > 1 else (f"window {window + 1}", sinks, window + 1)
    return (short, (f"sinks {sinks - 1}", sinks - 1, window)) if sinks else (short,)


def _first_difference(steps: int, right: _Streamed, wrong: _Streamed) -> int | None:
    """First position below `steps` whose query attends to other tokens in some layer; None if there is none."""
    pairs = [((right.sinks, right.window), (wrong.sinks, wrong.window))] if right.full else []
    if right.trained is not None and wrong.trained is not None:
        pairs.append(((0, right.trained), (0, wrong.trained)))
    found = [position for pair in pairs if (position := _first_other_set(steps, *pair)) is not None]
    return min(found, default=None)


def _first_other_set(steps: int, right: tuple[int, int], wrong: tuple[int, int]) -> int | None:
    # Both see all tokens before the smaller S + W - 1.
    start = min(sinks + window for sinks, window in (right, wrong)) - 1
    return next((query for query in range(start, steps) if attended(query, *right) != attended(query, *wrong)), None)


def _logits(policy: Policy, network: Any, ids: NDArray[np.int64], asked: _Streamed) -> torch.Tensor:
    oracle = streaming_logits if policy == "streaming" else masked_dense_logits
    trained = nullcontext() if asked.trained is None else trained_window_replaced(network, asked.trained)
    with trained:
        return oracle(network, torch.from_numpy(ids), asked.sinks, asked.window)


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
    """Report each decoder layer of a pass over all `tokens`, and each step of passes over one; others are the oracle's own checks."""
    layers = list(attrgetter(find_family(network.config).layers)(network))
    steps = 0

    def report(number: int) -> Callable[[Any, Any, Any], None]:
        def hook(_layer: Any, inputs: Any, _output: Any) -> None:
            nonlocal steps
            if not inputs:
                return
            if inputs[0].shape[1] == tokens:
                progress(stage, number, len(layers))
            elif inputs[0].shape[1] == 1 and number == len(layers):
                steps += 1
                progress(stage, min(steps, tokens), tokens)

        return hook

    progress(stage, 0, len(layers))
    handles = [layer.register_forward_hook(report(number)) for number, layer in enumerate(layers, start=1)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
