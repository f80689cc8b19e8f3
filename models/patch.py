"""Temporary changes to a Hugging Face decoder, always undone, for the oracle to see and steer its attention.

Also what the oracle refuses: a setting that it would pass over makes it a wrong truth.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sinkring.models.errors import UnsupportedModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# (layer index, query [H, T, D], key [G, T, D], value [G, T, D], scale) -> attention output [H, T, D]
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]

ATTENTION_NAME = "sinkring_oracle"

# What decoders hand to an attention function beside its tensors and which does not change its result at inference.
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
}
_CONSTANT_ROPE = {"default", "linear", "llama3", "yarn"}
# Their frequencies depend on the length of the sequence: a forward pass sets them.
_LENGTH_ROPE = {"dynamic", "longrope"}


def check_full_attention(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if a layer of `model` is not plain full attention: the oracle's mask would replace the trained one."""
    config = model.config.get_text_config()
    name = config.model_type
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise UnsupportedModel(
            f"{name}: trained with sliding_window={window}, the oracle masks all layers alike; only sliding_window=None is supported"
        )
    other = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    if other:
        raise UnsupportedModel(
            f"{name}: has layers of type {', '.join(other)}; only models with full_attention in all layers are supported"
        )
    dtypes = {weight.dtype for weight in model.parameters()}
    if not dtypes <= {torch.float32, torch.float64} or len(dtypes) != 1:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise UnsupportedModel(f"{name}: weights are {found}, the oracle runs in float32 or float64; load with dtype=torch.float32")


def rotary_module(model: PreTrainedModel) -> nn.Module:
    """The one module that gives all layers their angles: buffer inv_freq [R/2] float, attribute attention_scaling.

    Raises UnsupportedModel if there is none or if its frequencies change from layer to layer or in a way that is not known.
    """
    name = model.config.model_type
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None or not isinstance(getattr(rotary, "inv_freq", None), Tensor):
        raise UnsupportedModel(
            f"{name}: {type(model.base_model).__name__} has no rotary_emb with an inv_freq; "
            "the oracle reads decoders with rotary positions (Llama, Qwen2, Mistral, ...)"
        )
    rope_type = getattr(rotary, "rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in _CONSTANT_ROPE | _LENGTH_ROPE:
        known = ", ".join(sorted(_CONSTANT_ROPE | _LENGTH_ROPE))
        raise UnsupportedModel(f"{name}: rope type {rope_type!r} is not supported; supported are {known}")
    return rotary


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block all layers of `model` use the attention registered as `name`."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def rotary_replaced(model: PreTrainedModel, replacement: nn.Module) -> Iterator[None]:
    """Within the block `replacement` gives the angles: called as (x, position_ids [1, N]), returns cos and sin [1, N, R]."""
    before = rotary_module(model)
    model.base_model.rotary_emb = replacement
    try:
        yield
    finally:
        model.base_model.rotary_emb = before


@contextmanager
def attention_seen(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Within the block every layer calls `attend` with queries and keys that are not rotated, and with no mask.

    Raises UnsupportedModel during a forward pass whose layers ask for something that `attend` is not told of (softcap, sink logits, ...).
    """
    name = model.config.model_type

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        for option, setting in options.items():
            if option not in _WITHOUT_EFFECT and setting is not None:
                raise UnsupportedModel(f"{name}: its attention uses {option}={setting!r}, which the streaming oracle does not know")
        output = attend(module.layer_idx, query[0], key[0], value[0], scaling)
        return output.transpose(0, 1)[None].contiguous(), None

    # No mask function goes with it: `attend` decides by itself what is seen, and transformers then hands over no mask.
    type(ALL_ATTENTION_FUNCTIONS).register(ATTENTION_NAME, attention)
    try:
        with attention_implementation(model, ATTENTION_NAME), rotary_replaced(model, _NoRotation(rotary_module(model))):
            yield
    finally:
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[ATTENTION_NAME]


def rotary_at_length(rotary: nn.Module, tokens: int) -> nn.Module:
    """The rotary module as a forward pass over a sequence of `tokens` tokens leaves it; `rotary` itself stays as it is."""
    if getattr(rotary, "rope_type", "default") not in _LENGTH_ROPE:
        return rotary
    fresh: nn.Module = type(rotary)(rotary.config)  # every family's takes its configuration
    fresh(torch.zeros(1), torch.tensor([[tokens - 1]]))
    return fresh


def _inv_freq(rotary: nn.Module) -> Tensor:
    frequencies = rotary.inv_freq
    assert isinstance(frequencies, Tensor), "rotary_module has checked it"
    return frequencies


class _NoRotation(nn.Module):
    """cos = 1, sin = 0: the model's own rotation then leaves queries and keys as they are."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotated_dims = 2 * len(_inv_freq(rotary))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self.rotated_dims)
        return torch.ones(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)


class ExactRotation(nn.Module):
    """The model's own rotation with its angles computed in float64: fp32(position * inv_freq) is wrong by 0.06 rad at position 1e6.

    tokens: length of the sequence whose angles they are, which matters to a rotary module that scales with it.
    """

    def __init__(self, rotary: nn.Module, tokens: int) -> None:
        super().__init__()
        rotary = rotary_at_length(rotary, tokens)
        self.angles_per_token = _inv_freq(rotary).double()
        self.scaling = float(getattr(rotary, "attention_scaling", 1.0))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids int64 [...] -> cos, sin [..., R] in the dtype of x; both halves of R hold the same R/2 angles."""
        angles = position_ids[..., None].double() * self.angles_per_token
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.scaling).to(x.dtype), (both.sin() * self.scaling).to(x.dtype)
