"""Steering a Hugging Face decoder while it is run or traced; whatever touches transformers' internals in the exporter is here.

Hooked, for the time of a block: the rotary module (cos and sin come from outside), `apply_rotary_pos_emb` of the model's file (one
RotaryEmbedding), the attention function (given to the caller) and the experts of a mixture (static shapes). All else, biases, norms,
multipliers, routers, is the model's own and stays as it stands.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from sinkring.exporter.experts import run_experts
from sinkring.models.registry import Family
from sinkring.models.token_call import text_config
from sinkring.runtime.errors import UnsupportedError
from torch import Tensor
from torch.onnx.ops import rotary_embedding

ATTENTION = "sinkring_ring_attention"
EXPERTS = "sinkring_experts"

# Keywords of an attention function that do not change what it computes in inference, or not what is computed here.
_WITHOUT_EFFECT = frozenset(
    [
        "dropout",
        "position_ids",
        "cache",
        "past_key_values",
        "past_key_value",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
    ]
)


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks of its attention.

    query [B,H,T,D] and key [B,G,T,D], turned where the layer turns them; value [B,G,T,D]. rope: the set of angles that turned them, "" for
    the only one, None in a layer that turns nothing. window: trained window in tokens, None for full attention. softcap: 0.0 for none.
    sink_logits [H]: learned, a column of the softmax without a value; None for none.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    rope: str | None
    window: int | None
    softcap: float
    sink_logits: Tensor | None


# A set of angles by its name -> cos, sin [B,T,R/2].
AnglesOf = Callable[[str], tuple[Tensor, Tensor]]
# -> attended [B,H,T,D]
Attend = Callable[[AttentionCall], Tensor]


def decoder_layers(model: Any, family: Family) -> list[Any]:
    return list(attrgetter(family.layers)(model))


def rotary_module(model: Any, family: Family) -> Any | None:
    return attrgetter(family.rotary)(model) if family.rotary else None


@contextmanager
def hooked(model: Any, family: Family, angles_of: AnglesOf, attend: Attend) -> Iterator[None]:
    """Within the block the model's layers call `attend`, after turning queries and keys by the angles of `angles_of`.

    Raises UnsupportedError, during a forward pass, for what an attention asks for that is not known here.
    """
    hooks = _Hooks(model, family, angles_of, attend)
    attention = getattr(decoder_layers(model, family)[0], family.attention)
    modeling = sys.modules[type(attention).__module__]
    with ExitStack() as stack:
        stack.enter_context(_implementation(text_config(model), hooks))
        rotary = rotary_module(model, family)
        if rotary is not None:
            stack.enter_context(patch.object(modeling, "apply_rotary_pos_emb", hooks.swapped_rotary if family.swapped else hooks.rotary))
            stack.enter_context(patch.object(type(rotary), "forward", hooks.angles))
        if family.forward is not None:
            stack.enter_context(patch.object(type(attention), "forward", hooks.own_forward))
        yield


@contextmanager
def _implementation(config: Any, hooks: "_Hooks") -> Iterator[None]:
    from transformers import AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, hooks.attention)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run_experts)
    # The mask is made in the graph, where the ring is; some models only want one that they can convert.
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: torch.zeros((), dtype=torch.bool))
    before = config._attn_implementation, getattr(config, "_experts_implementation", None)
    config._attn_implementation, config._experts_implementation = ATTENTION, EXPERTS
    try:
        yield
    finally:
        config._attn_implementation, config._experts_implementation = before
        # Through the hooks the registry would keep the whole model alive.
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[ATTENTION]


class _Hooks:
    """The functions that stand in for the model's own. A layer turns its query and key before it attends, so what turned last is its."""

    def __init__(self, model: Any, family: Family, angles_of: AnglesOf, attend: Attend) -> None:
        self._name = text_config(model).model_type
        self._family, self._angles_of, self._attend = family, angles_of, attend
        self._windows = family.window(text_config(model)) if family.window else None
        self._made: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no id of `_made` is given to another tensor
        self._turned_by: str | None = None

        # Bound methods would be called without the module that they stand in for.
        self.angles = lambda _module, *args, **kwargs: self._angles(*args, **kwargs)
        self.own_forward = lambda module, *args, **kwargs: self._own_forward(module, *args, **kwargs)

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1:
            raise UnsupportedError(f"{self._name}: turns heads along axis {unsqueeze_dim}, only 1 is known: this model is not supported")
        return self._turn(query, cos, sin), self._turn(key, cos, sin)

    def swapped_rotary(self, tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        return self._turn(tensor.transpose(1, 2), cos, sin).transpose(1, 2)

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        asked = [name for name, value in options.items() if name not in _WITHOUT_EFFECT and value is not None]
        if is_causal is False:
            asked.append("is_causal")
        if asked:
            raise UnsupportedError(f"{self._name}: its attention asks for {asked[0]}, which is not known: this model is not supported")
        layer = module.layer_idx
        attended = self._attend(
            AttentionCall(
                layer=layer,
                query=query,
                key=key,
                value=value,
                scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
                rope=self._turned_by,
                window=self._windows[layer] if self._windows else sliding_window,
                softcap=float(softcap or 0.0),
                sink_logits=s_aux,
            )
        )
        self._turned_by = None
        return attended.transpose(1, 2), None

    def _own_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            attended, _ = self.attention(module, query, key, value, None, scaling=scale)
            return attended.flatten(2)

        assert self._family.forward is not None, "hooked only then"
        return self._family.forward(attend, self.rotary, module, *args, **kwargs)

    def _angles(self, _x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None, **_: Any) -> tuple[Tensor, Tensor]:
        name = layer_type or ""
        cos, sin = self._angles_of(name)
        self._made[id(cos)] = name
        self._kept.append(cos)
        return (sin, cos) if self._family.swapped else (cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self._turned_by = self._made[id(cos)]
        rotated = 2 * cos.shape[-1]
        partial = 0 if rotated == x.shape[-1] else rotated
        turned: Tensor = rotary_embedding(x.float(), cos, sin, interleaved=self._family.interleaved, rotary_embedding_dim=partial)
        return turned.to(x.dtype)
