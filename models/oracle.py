"""The oracle: what every graph and engine is proven against. Slow, literal, and free of any code of the exporter or the runtime.

A stream of N tokens with S sinks and a window of W tokens (the current one included). The query at q attends to

    A(q) = {0 .. min(S, q+1)-1}  and  {max(S, q-W+1) .. q}

`masked_dense_logits` gives these tokens the positions the model was trained with (policy "native"); `streaming_logits` gives them their
places in the cache (policy "streaming", StreamingLLM, arXiv 2309.17453). Where a model's angles depend on the length of its sequence
(rope types dynamic, longrope), it is that of the longest in which tokens meet: S + W for the streaming policy, for the native one W without
sinks and N with them, and N where that is less. Letters: N tokens, H query heads, G key/value heads, D head size,
V vocabulary, R rotated head dimensions, L tokens in a cache, at most S + W.
"""

from contextlib import nullcontext

import torch
from sinkring.models.errors import ModelError, UnsupportedModel
from sinkring.models.patch import (
    ExactRotation,
    attention_implementation,
    attention_seen,
    check_full_attention,
    rotary_module,
    rotary_replaced,
)
from torch import Tensor
from transformers import PreTrainedModel

# Queries whose gathered caches are held at a time: 64 caches of 256 tokens of SmolLM2 are 12 MB a layer.
_QUERIES_AT_A_TIME = 64
_PROBE_TOKENS = 6


def attended(query: int, sinks: int, window: int) -> list[int]:
    """A(query): the tokens of the stream that the query attends to, ascending; these are also the tokens in its cache, in order."""
    return [key for key in range(query + 1) if key < sinks or key > query - window]


@torch.no_grad()
def masked_dense_logits(
    model: PreTrainedModel, ids: Tensor, sinks: int, window: int, start_position: int = 0, exact_angles: bool = True
) -> Tensor:
    """Logits [N, V] of the native policy for ids [N] int64, in the model's dtype.

    Eager Hugging Face attention over the whole sequence under an explicit additive mask. Token i of the stream is at position
    start_position + i. The model's angles are computed in float64; exact_angles=False leaves its own float32 ones, and thus runs a model
    in which nothing is changed. Memory: a few times H * N * N numbers. Raises UnsupportedModel, ModelError.
    """
    _check(model, ids, sinks, window)
    tokens = len(ids)
    mask = torch.full((tokens, tokens), float("-inf"), dtype=model.dtype)
    for query in range(tokens):
        mask[query, attended(query, sinks, window)] = 0.0
    positions = start_position + torch.arange(tokens)
    length = tokens if sinks else min(window, tokens)
    exact = rotary_replaced(model, ExactRotation(rotary_module(model), length)) if exact_angles else nullcontext()
    with attention_implementation(model, "eager"), exact:
        return _forward(model, ids, positions, mask[None, None])


@torch.no_grad()
def streaming_logits(model: PreTrainedModel, ids: Tensor, sinks: int, window: int) -> Tensor:
    """Logits [N, V] of the streaming policy for ids [N] int64, in the model's dtype (float32 or float64).

    For each query on its own: gather the un-rotated keys of its cache, rotate each by its index in that cache and the query by the last
    index, attend. A layer does so for all queries of the stream, in blocks. Raises UnsupportedModel, ModelError.
    """
    _check_streaming(model, ids, sinks, window)
    return _streaming_in_blocks(model, ids, sinks, window)


@torch.no_grad()
def streaming_logits_stepwise(model: PreTrainedModel, ids: Tensor, sinks: int, window: int) -> Tensor:
    """The same as `streaming_logits`, as StreamingLLM runs: token by token, with a cache that evicts. For short streams.

    Each layer's cache is a list of (key [G, D] not rotated, value [G, D]); with S + W of them full, the oldest after the sinks goes.
    """
    _check_streaming(model, ids, sinks, window)
    rotation = ExactRotation(rotary_module(model), sinks + window)
    caches: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        cache = caches.setdefault(layer, [])
        cache.append((key[:, 0], value[:, 0]))
        if len(cache) > sinks + window:
            del cache[sinks]
        heads_per_group = query.shape[0] // key.shape[0]
        index = torch.arange(len(cache))
        keys = _rotate(torch.stack([key for key, _ in cache], dim=1), index, rotation)  # [G, L, D]
        values = torch.stack([value for _, value in cache], dim=1)
        last = _rotate(query, index[-1:], rotation)  # [H, 1, D]
        outputs = []
        for head in range(query.shape[0]):
            group = head // heads_per_group
            weights = torch.softmax(keys[group] @ last[head, 0] * scale, dim=0)  # [L]
            outputs.append(weights @ values[group])
        return torch.stack(outputs)[:, None]

    with attention_seen(model, attend):
        # The position given here reaches no rotation, since `attention_seen` takes that out of the model.
        return torch.cat([_forward(model, ids[step : step + 1], torch.zeros(1, dtype=torch.int64), None) for step in range(len(ids))])


def top2_margin(logits: Tensor) -> Tensor:
    """How far the best token is ahead of the second: logits [..., V] -> [...]. An argmax can flip only if an error reaches half of it."""
    best = torch.topk(logits, 2, dim=-1).values
    return best[..., 0] - best[..., 1]


def _streaming_in_blocks(model: PreTrainedModel, ids: Tensor, sinks: int, window: int) -> Tensor:
    rotation = ExactRotation(rotary_module(model), sinks + window)
    tokens = len(ids)
    caches = [attended(query, sinks, window) for query in range(tokens)]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        blocks = []
        for start in range(0, tokens, _QUERIES_AT_A_TIME):
            block = caches[start : start + _QUERIES_AT_A_TIME]
            blocks.append(_attend_each(query[:, start : start + len(block)], key, value, block, scale, rotation))
        return torch.cat(blocks, dim=1)

    with attention_seen(model, attend):
        return _forward(model, ids, torch.zeros(tokens, dtype=torch.int64), None)


def _attend_each(query: Tensor, key: Tensor, value: Tensor, caches: list[list[int]], scale: float, rotation: ExactRotation) -> Tensor:
    """Attention of each query to the tokens of its own cache, all rotated by cache index.

    query [H, T, D]; key, value [G, N, D]; caches: T lists of token numbers; returns [H, T, D].
    """
    longest = max(len(cache) for cache in caches)
    # Shorter caches (before the window is full) are filled up with token 0, and these places masked.
    tokens = torch.tensor([cache + [0] * (longest - len(cache)) for cache in caches])  # [T, L]
    lengths = torch.tensor([len(cache) for cache in caches])
    index = torch.arange(longest)
    empty = index >= lengths[:, None]
    keys = _rotate(key[:, tokens], index, rotation)  # [G, T, L, D]
    queries = _rotate(query, lengths - 1, rotation).unflatten(0, (key.shape[0], -1))  # [G, H/G, T, D]
    scores = torch.einsum("ghtd,gtld->ghtl", queries, keys) * scale
    weights = torch.softmax(scores.masked_fill(empty, float("-inf")), dim=-1)
    return torch.einsum("ghtl,gtld->ghtd", weights, value[:, tokens]).flatten(0, 1)


def _rotate(x: Tensor, index: Tensor, rotation: ExactRotation) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of x [..., L, D] by index [L] int64; dimension i turns with i + R/2, those from R on stay."""
    cos, sin = rotation(x, index)
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)


def _forward(model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """ids, positions [N] int64; additive mask [1, 1, N, N]; logits [N, V]."""
    logits: Tensor = model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False).logits[0]
    return logits


def _check(model: PreTrainedModel, ids: Tensor, sinks: int, window: int) -> None:
    if sinks < 0 or window < 1:
        raise ModelError(f"oracle: sinks={sinks}, window={window}; sinks must be 0 or more, window 1 or more (the current token counts)")
    if ids.dim() != 1 or ids.dtype != torch.int64 or len(ids) == 0:
        raise ModelError(f"oracle: ids are {ids.dtype} of shape {tuple(ids.shape)}; expected int64 of shape [N], N >= 1")
    vocabulary = int(model.config.get_text_config().vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ModelError(f"oracle: ids reach from {int(ids.min())} to {int(ids.max())}; the model knows 0 to {vocabulary - 1}")
    check_full_attention(model)


def _check_streaming(model: PreTrainedModel, ids: Tensor, sinks: int, window: int) -> None:
    """Raise UnsupportedModel unless, on a few tokens that all fit the cache, the oracle gives what the untouched model gives.

    This catches what no list of names does: another way to rotate, layers without rotation, terms that the attention adds.
    """
    _check(model, ids, sinks, window)
    rotary_module(model)
    few = ids[:_PROBE_TOKENS]
    with attention_implementation(model, "eager"):
        expected = model(input_ids=few[None], use_cache=False).logits[0]
    error = float((_streaming_in_blocks(model, few, 0, len(few)) - expected).abs().max())
    limit = 1e-3 * max(1.0, float(expected.abs().max()))
    if not error <= limit:
        raise UnsupportedModel(
            f"{model.config.model_type}: on {len(few)} tokens the streaming oracle is off by {error:.2g}, more than {limit:.2g}; "
            "the model rotates or attends in a way that the oracle does not know"
        )
