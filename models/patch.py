"""Temporary changes to a Hugging Face decoder, always undone, for the oracle to see and steer its attention."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from sinkring.models.errors import UnsupportedModel
from sinkring.models.token_call import decoder_of, text_config
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@dataclass(frozen=True)
class Terms:
    """What goes into scores beside queries and keys: score = softcap * tanh(scale * q.k / softcap).

    sink_logits [H]: learned logits that take part in the softmax and have no value (gpt-oss); not the sinks of a stream.
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


# (layer index, query [H, T, D], key [G, T, D], value [G, T, D], terms) -> attention output [H, T, D]
Attend = Callable[[int, Tensor, Tensor, Tensor, Terms], Tensor]

ATTENTION_NAME = "sinkring_oracle"

# What decoders hand to an attention function beside its tensors and which does not change its result at inference. The windows of layers
# are the caller's to know.
_WITHOUT_EFFECT = {
    "dropout",
    "position_ids",
    "cache",
    "past_key_values",
    "cache_position",
    "use_cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "sliding_window",
    "output_router_logits",
}
_TERMS = {"softcap": "softcap", "s_aux": "sink_logits"}

# transformers gives these windows to their caches and not to their masks: over a whole sequence they would see everything.
_WINDOW_IN_CACHE_ONLY = {"kyutai_speech_to_text", "moshi"}


def check_dtype(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel unless all weights are float32 or all float64."""
    dtypes = {weight.dtype for weight in model.parameters()}
    if not dtypes <= {torch.float32, torch.float64} or len(dtypes) != 1:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise UnsupportedModel(
            f"{model.config.model_type}: weights are {found}, the oracle runs in float32 or float64; load with dtype=torch.float32"
        )


def modeling_of(model: PreTrainedModel) -> ModuleType:
    """The file of transformers that the decoder's code is in."""
    return sys.modules[type(decoder_of(model)).__module__]


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block all layers of `model` use the attention registered as `name`."""
    config = text_config(model)
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def check_masks(model: PreTrainedModel, windows: tuple[int | None, ...]) -> None:
    """Raise UnsupportedModel for windows that transformers' code of the model passes over, or masks that are made in an unknown way."""
    modeling, name = modeling_of(model), model.config.model_type
    if not hasattr(modeling, "create_causal_mask"):
        raise UnsupportedModel(f"{name}: {modeling.__name__} makes its masks in a way that the oracle does not know")
    if any(windows) and not _knows_windows(modeling) and name not in _WINDOW_IN_CACHE_ONLY:
        raise UnsupportedModel(
            f"{name}: sliding_window={text_config(model).sliding_window} is not honoured by transformers' {modeling.__name__}; "
            "remove it if the model was trained without it"
        )


def _knows_windows(modeling: ModuleType) -> bool:
    return hasattr(modeling, "create_sliding_window_causal_mask")


@contextmanager
def full_masks_replaced(model: PreTrainedModel, windows: tuple[int | None, ...], mask: Tensor | None) -> Iterator[None]:
    """Within the block layers with full attention (None in windows) see by the additive mask [1, 1 or H, T, L], or as trained if None.

    Layers with a trained window keep the mask that transformers makes for it. See `check_masks`.
    """
    modeling = modeling_of(model)
    knows_windows = _knows_windows(modeling)
    sliding = any(windows)

    def full(*args: Any, **kwargs: Any) -> Tensor | None:
        if sliding and not knows_windows:
            return masking_utils.create_sliding_window_causal_mask(*args, **kwargs)
        return masking_utils.create_causal_mask(*args, **kwargs) if mask is None else mask

    with ExitStack() as stack:
        stack.enter_context(patch.object(modeling, "create_causal_mask", full))
        if knows_windows and not sliding:
            stack.enter_context(patch.object(modeling, "create_sliding_window_causal_mask", full))
        yield


@contextmanager
def attention_seen(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Within the block every layer that looks its attention up calls `attend`, with no mask.

    Raises UnsupportedModel during a forward pass whose layers ask for something that `attend` is not told of.
    """
    name = model.config.model_type

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        terms: dict[str, Any] = {}
        for option, setting in options.items():
            if option in _TERMS:
                terms[_TERMS[option]] = setting
            elif option not in _WITHOUT_EFFECT and setting is not None:
                raise UnsupportedModel(f"{name}: its attention uses {option}={setting!r}, which the streaming oracle does not know")
        output = attend(module.layer_idx, query[0], key[0], value[0], Terms(scaling, **terms))
        return output.transpose(0, 1)[None].contiguous(), None

    # No mask function goes with it: `attend` decides by itself what is seen, and transformers then hands over no mask.
    type(ALL_ATTENTION_FUNCTIONS).register(ATTENTION_NAME, attention)
    try:
        with attention_implementation(model, ATTENTION_NAME):
            yield
    finally:
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[ATTENTION_NAME]
