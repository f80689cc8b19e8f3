"""The oracle: what every graph and engine is proven against. Slow, literal, and free of any code of the exporter or the runtime.

A stream of N tokens with S sinks and a window of W tokens (the current one included). In a layer with full attention the query at q sees

    A(q) = {0 .. min(S, q+1)-1}  and  {max(S, q-W+1) .. q}

A layer with a trained sliding window keeps that window and has no sinks, under either policy. `masked_dense_logits` gives the tokens of
A(q) the positions the model was trained with (policy "native"); `streaming_logits` gives them their places in the cache (policy
"streaming", StreamingLLM, arXiv 2309.17453). Where a model's angles depend on the length of its sequence (rope types dynamic, longrope), it
is that of the longest in which tokens meet: S + W for the streaming policy, for the native one W without sinks and N with them, and N where
that is less. Rotary angles and ALiBi are exact where transformers rounds them: see `rotation.py` and `alibi.py`. Letters: N tokens, H query
heads, G key/value heads, D head size, V vocabulary, L tokens in a cache.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from sinkring.models.alibi import alibi_by_cache_index, alibi_slopes, attention_with_alibi, exact_alibi
from sinkring.models.anatomy import Layer, geometry_of, longest_reach, read_layers, trained_windows
from sinkring.models.errors import ModelError, UnsupportedModel
from sinkring.models.patch import (
    Terms,
    attention_implementation,
    attention_seen,
    check_dtype,
    check_masks,
    full_masks_replaced,
    modeling_of,
)
from sinkring.models.rotation import AngleSet, exact_angles
from sinkring.models.streaming_cache import Turn, streaming_cache
from sinkring.models.token_call import run_decoder, text_config
from torch import Tensor
from transformers import PreTrainedModel

# Queries whose gathered caches are held at a time: 64 caches of 256 tokens of SmolLM2 are 12 MB a layer.
_QUERIES_AT_A_TIME = 64
_PROBE_TOKENS = 6
_PROBE_TOLERANCE = 1e-3

Oracle = Callable[[PreTrainedModel, tuple[Layer, ...], Tensor, int, int], Tensor]


def attended(query: int, sinks: int, window: int) -> list[int]:
    """A(query): the tokens of the stream that the query attends to, ascending; these are also the tokens in its cache, in order."""
    return [key for key in range(query + 1) if key < sinks or key > query - window]


@torch.no_grad()
def masked_dense_logits(
    model: PreTrainedModel,
    ids: Tensor,
    sinks: int,
    window: int,
    start_position: int = 0,
    exact_angles: bool = True,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """Logits [N, V] of the native policy for ids [N] int64, or embedded rows [N, hidden] in their place, in the model's dtype.

    Eager Hugging Face attention over the whole sequence under an explicit additive mask in layers with full attention, and under Hugging
    Face's own in the others. Token i of the stream is at position start_position + i. The model's angles are computed in float64;
    exact_angles=False leaves its own float32 ones. narrow: see `streaming_logits`.
    Memory: a few times H * N * N numbers. Raises UnsupportedModel, ModelError.
    """
    layers = _check(model, ids, sinks, window)
    dense = partial(_dense, start_position=start_position, exact=exact_angles)
    _probe(model, layers, ids, {"native": _dense})
    _narrow(model, narrow)
    return dense(model, layers, ids, sinks, window)


@torch.no_grad()
def streaming_logits(model: PreTrainedModel, ids: Tensor, sinks: int, window: int, narrow: torch.dtype | None = None) -> Tensor:
    """Logits [N, V] of the streaming policy for ids [N] int64, or embedded rows [N, hidden], in the model's dtype (float32 or float64).

    narrow: a type of 16 bits that the model is rounded to, for good, and runs in: no oracle, but what rounding does to eager PyTorch.

    For each query on its own: gather the un-rotated keys of its cache, rotate each by its index in that cache and the query by the last
    index, attend. A layer does so for all queries of the stream, in blocks, if it lets its attention be replaced and asks for no more than
    scale, softcap and learned sink logits; else the model runs as in `streaming_logits_stepwise`. Raises UnsupportedModel, ModelError.
    """
    layers = _check(model, ids, sinks, window)
    form = _probe(model, layers, ids, {"streaming, in blocks": _streaming_in_blocks, "streaming": _streaming_in_steps})
    _narrow(model, narrow)
    return form(model, layers, ids, sinks, window)


@torch.no_grad()
def streaming_logits_stepwise(model: PreTrainedModel, ids: Tensor, sinks: int, window: int) -> Tensor:
    """The same as `streaming_logits`, as StreamingLLM runs: token by token, in the model's own code, with a cache that evicts.

    Each layer's cache keeps un-rotated keys; with S + W of them full, the oldest after the sinks goes.
    """
    layers = _check(model, ids, sinks, window)
    form = _probe(model, layers, ids, {"streaming": _streaming_in_steps})
    return form(model, layers, ids, sinks, window)


def _narrow(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Weights only: rotary frequencies are buffers, and stay as transformers keeps them."""
    if dtype is not None:
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)


def top2_margin(logits: Tensor) -> Tensor:
    """How far the best token is ahead of the second: logits [..., V] -> [...]. An argmax can flip only if an error reaches half of it."""
    best = torch.topk(logits, 2, dim=-1).values
    return best[..., 0] - best[..., 1]


def _dense(
    model: PreTrainedModel, layers: tuple[Layer, ...], ids: Tensor, sinks: int, window: int, start_position: int = 0, exact: bool = True
) -> Tensor:
    tokens = len(ids)
    mask = torch.full((tokens, tokens), float("-inf"), dtype=model.dtype)
    for query in range(tokens):
        mask[query, attended(query, sinks, window)] = 0.0
    windows = tuple(layer.window for layer in layers)

    def length(angles: AngleSet) -> int:
        reach = longest_reach(layers, angles, 0, tokens if sinks else window)
        return max(1, min(reach, tokens))

    positions = start_position + torch.arange(tokens)
    with (
        attention_implementation(model, attention_with_alibi(model)),
        exact_alibi(model, tokens, mask[None, None]) as biased,
        full_masks_replaced(model, windows, biased),
        exact_angles(model, length) if exact else nullcontext(),
    ):
        return run_decoder(model, ids, positions)


def _streaming_in_steps(model: PreTrainedModel, layers: tuple[Layer, ...], ids: Tensor, sinks: int, window: int) -> Tensor:
    cache = streaming_cache(
        [(*geometry_of(layer.window, sinks, window), layer.window is not None, _turn(layers, layer, sinks, window)) for layer in layers]
    )
    # At position 0 the model's own rotation turns nothing.
    start = torch.zeros(1, dtype=torch.int64)
    with (
        attention_implementation(model, attention_with_alibi(model)),
        alibi_by_cache_index(model, sinks + window),
        full_masks_replaced(model, tuple(layer.window for layer in layers), None),
    ):
        steps = [run_decoder(model, ids[step : step + 1], start, cache) for step in range(len(ids))]
    return torch.cat(steps)


def _streaming_in_blocks(model: PreTrainedModel, layers: tuple[Layer, ...], ids: Tensor, sinks: int, window: int) -> Tensor:
    if alibi_slopes(model) is not None or not hasattr(modeling_of(model), "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedModel(f"{model.config.model_type}: its attention cannot be replaced")
    tokens = len(ids)
    seen: set[int] = set()

    def attend(number: int, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        seen.add(number)
        geometry = geometry_of(layers[number].window, sinks, window)
        turn = _turn(layers, layers[number], sinks, window)
        blocks = []
        for start in range(0, tokens, _QUERIES_AT_A_TIME):
            block = [attended(at, *geometry) for at in range(start, min(start + _QUERIES_AT_A_TIME, tokens))]
            blocks.append(_attend_each(query[:, start : start + len(block)], key, value, block, terms, turn))
        return torch.cat(blocks, dim=1)

    with attention_seen(model, attend):
        # At position 0 the model's own rotation turns nothing.
        logits = run_decoder(model, ids, torch.zeros(tokens, dtype=torch.int64))
    if len(seen) != len(layers):
        raise UnsupportedModel(f"{model.config.model_type}: {len(layers) - len(seen)} of {len(layers)} layers attend by themselves")
    return logits


def _turn(layers: tuple[Layer, ...], layer: Layer, sinks: int, window: int) -> Turn | None:
    if layer.rotation is None:
        return None
    return partial(layer.rotation.turn, tokens=longest_reach(layers, layer.rotation.angles, sinks, window))


def _attend_each(query: Tensor, key: Tensor, value: Tensor, caches: list[list[int]], terms: Terms, turn: Turn | None) -> Tensor:
    """Attention of each query to the tokens of its own cache, all rotated by cache index.

    query [H, T, D]; key, value [G, N, D]; caches: T lists of token numbers; returns [H, T, D].
    """
    longest = max(len(cache) for cache in caches)
    # Shorter caches (before the window is full) are filled up with token 0, and these places masked.
    tokens = torch.tensor([cache + [0] * (longest - len(cache)) for cache in caches])  # [T, L]
    lengths = torch.tensor([len(cache) for cache in caches])
    index = torch.arange(longest)
    empty = index >= lengths[:, None]
    keys = key[:, tokens]  # [G, T, L, D]
    if turn is not None:
        keys, query = turn(keys, index), turn(query, lengths - 1)
    queries = query.unflatten(0, (key.shape[0], -1))  # [G, H/G, T, D]
    scores = torch.einsum("ghtd,gtld->ghtl", queries, keys) * terms.scale
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.masked_fill(empty, float("-inf"))
    if terms.sink_logits is not None:
        learned = terms.sink_logits.unflatten(0, (key.shape[0], -1))[:, :, None, None]  # [G, H/G, 1, 1]
        scores = torch.cat((scores, learned.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :longest]
    return torch.einsum("ghtl,gtld->ghtd", weights, value[:, tokens]).flatten(0, 1)


def _check(model: PreTrainedModel, ids: Tensor, sinks: int, window: int) -> tuple[Layer, ...]:
    if sinks < 0 or window < 1:
        raise ModelError(f"oracle: sinks={sinks}, window={window}; sinks must be 0 or more, window 1 or more (the current token counts)")
    vocabulary, hidden = int(text_config(model).vocab_size), int(text_config(model).hidden_size)
    rows = ids.dim() == 2 and ids.dtype == model.dtype and ids.shape[1] == hidden and len(ids) > 0
    if not rows and (ids.dim() != 1 or ids.dtype != torch.int64 or len(ids) == 0):
        raise ModelError(
            f"oracle: ids are {ids.dtype} of shape {tuple(ids.shape)}; expected int64 of shape [N], N >= 1, "
            f"or rows {model.dtype} [N, {hidden}]"
        )
    if not rows and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ModelError(f"oracle: ids reach from {int(ids.min())} to {int(ids.max())}; the model knows 0 to {vocabulary - 1}")
    check_dtype(model)
    check_masks(model, trained_windows(model))
    return read_layers(model)


def _probe(model: PreTrainedModel, layers: tuple[Layer, ...], ids: Tensor, forms: dict[str, Oracle]) -> Oracle:
    """The first form that, on a few tokens that all fit every cache, gives what the untouched model gives.

    This catches what no list of names does: another way to rotate, terms that the attention adds, positions that are learned. Raises
    UnsupportedModel, for the last form's reason, if none does.
    """
    few = ids[: min(_PROBE_TOKENS, *(layer.window or _PROBE_TOKENS for layer in layers))]
    with attention_implementation(model, attention_with_alibi(model)):
        expected = run_decoder(model, few)
    limit = _PROBE_TOLERANCE * max(1.0, float(expected.abs().max()))
    reason = ""
    for name, form in forms.items():
        try:
            error = float((form(model, layers, few, 0, len(few)) - expected).abs().max())
        except UnsupportedModel as refused:
            reason = str(refused)
            continue
        if error <= limit:
            return form
        reason = (
            f"{model.config.model_type}: on {len(few)} tokens the oracle ({name}) is off by {error:.2g}, more than {limit:.2g}; "
            "the model rotates or attends in a way that the oracle does not know"
        )
    raise UnsupportedModel(reason)
