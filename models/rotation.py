"""Rotary angles as a model's own modules make them: read, turned exactly at any position, and put in place of the model's float32 ones.

Three layouts of cos and sin are in use, and two orders; two layouts of the dimensions that turn together. Neither is looked up by name:
both are told apart by what the model itself computes. Letters: L positions, D head size, R rotated dimensions, the first of D.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from sinkring.models.errors import UnsupportedModel
from sinkring.models.token_call import decoder_of
from torch import Tensor, nn
from transformers import PreTrainedModel

_CONSTANT_ROPE = {"default", "linear", "llama3", "yarn"}
# Their frequencies depend on the length of the sequence: a forward pass sets them.
_LENGTH_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class AngleSet:
    """The angles that one rotary module gives, to all its layers or to those of one type (Gemma 3 and OLMo 3 have two sets)."""

    module: nn.Module
    layer_type: str | None = None

    def at_length(self, tokens: int) -> tuple[Tensor, float]:
        """inv_freq float32 [R/2], radians per token, and the factor on cos and sin, of a sequence of `tokens` tokens."""
        module = rotary_at_length(self.module, tokens, self.layer_type)
        if isinstance(table := getattr(module, "embed_positions", None), Tensor):  # GPT-J: sines and cosines, no frequencies
            pairs = table.shape[-1] // 2
            return 1.0 / (10000 ** (torch.arange(0, 2 * pairs, 2, dtype=torch.int64) / (2 * pairs))), 1.0
        prefix = f"{self.layer_type}_" if self.layer_type else ""
        return getattr(module, f"{prefix}inv_freq"), float(getattr(module, f"{prefix}attention_scaling", 1.0))

    def given(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What a new module of this kind returns for positions [L] int64: two tensors [L, R] or [L, R/2], mostly cos and sin."""
        first, second = _call(_fresh(self.module), positions[None], self.layer_type)
        return first[0], second[0]


@dataclass(frozen=True)
class Rotation:
    """How a layer turns its queries and keys. interleaved: entries 2i and 2i+1 turn together, else i and i + R/2."""

    angles: AngleSet
    interleaved: bool

    def turn(self, x: Tensor, positions: Tensor, tokens: int) -> Tensor:
        """x [..., L, D] turned by positions [L] int64 with the angles of a sequence of `tokens` tokens (arXiv 2104.09864), not scaled."""
        angles = positions[:, None].double() * self.angles.at_length(tokens)[0].double()
        cos, sin, rotated = angles.cos().to(x.dtype), angles.sin().to(x.dtype), 2 * angles.shape[-1]
        if self.interleaved:
            one, two = x[..., 0:rotated:2], x[..., 1:rotated:2]
            turned = torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1).flatten(-2)
        else:
            one, two = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
            turned = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
        return torch.cat((turned, x[..., rotated:]), dim=-1)


def angle_sets(model: PreTrainedModel) -> list[AngleSet]:
    """All sets of angles of the decoder, none without rotary positions. Raises UnsupportedModel for a kind that is not known."""
    found = []
    for name, module in decoder_of(model).named_modules():
        if not type(module).__name__.endswith("RotaryEmbedding"):
            continue
        rope_type = getattr(module, "rope_type", "default")
        kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, kind in kinds.items():
            if not isinstance(kind, str) or kind not in _CONSTANT_ROPE | _LENGTH_ROPE:
                known = ", ".join(sorted(_CONSTANT_ROPE | _LENGTH_ROPE))
                raise UnsupportedModel(f"{model.config.model_type}: rope type {kind!r} is not supported; supported are {known}")
            prefix = f"{layer_type}_" if layer_type else ""
            if not isinstance(getattr(module, f"{prefix}inv_freq", getattr(module, "embed_positions", None)), Tensor):
                raise UnsupportedModel(
                    f"{model.config.model_type}: {name} has neither inv_freq nor embed_positions: its angles are not known"
                )
            found.append(AngleSet(module, layer_type))
    return found


def rotary_at_length(rotary: nn.Module, tokens: int, layer_type: str | None = None) -> nn.Module:
    """The rotary module as a forward pass over a sequence of `tokens` tokens leaves it; `rotary` itself stays as it is."""
    rope_type: Any = getattr(rotary, "rope_type", "default")
    if (rope_type[layer_type] if isinstance(rope_type, dict) else rope_type) not in _LENGTH_ROPE:
        return rotary
    fresh = _fresh(rotary)
    _call(fresh, torch.tensor([[tokens - 1]]), layer_type)
    return fresh


@contextmanager
def exact_angles(model: PreTrainedModel, lengths: Callable[[AngleSet], int]) -> Iterator[None]:
    """Within the block the model's angles are computed in float64: fp32(position * inv_freq) is wrong by 0.06 rad at position 1e6.

    lengths: tokens of the sequence whose angles a set has. Raises UnsupportedModel for a layout of cos and sin that is not known.
    """
    by_module: dict[nn.Module, dict[str | None, Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]]] = {}
    for angles in angle_sets(model):
        by_module.setdefault(angles.module, {})[angles.layer_type] = _exact(model, angles, lengths(angles))

    def forward_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
        def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
            return by_module[module][layer_type](position_ids, x.dtype)

        return forward

    with ExitStack() as stack:
        for module in by_module:
            stack.enter_context(patch.object(module, "forward", forward_of(module)))
        yield


def _exact(model: PreTrainedModel, angles: AngleSet, tokens: int) -> Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """(position_ids int64 [...], dtype) -> what the module returns for them, in its own layout."""
    order, spread = _layout(model, angles)
    frequencies, scaling = angles.at_length(tokens)

    def values(position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        turns = position_ids[..., None].double() * frequencies.double()
        both = [spread(part * scaling).to(dtype) for part in (turns.cos(), turns.sin())]
        return both[order], both[1 - order]

    return values


def _halves(part: Tensor) -> Tensor:
    return torch.cat((part, part), dim=-1)


def _pairs(part: Tensor) -> Tensor:
    return torch.repeat_interleave(part, 2, dim=-1)


def _once(part: Tensor) -> Tensor:
    return part


def _layout(model: PreTrainedModel, angles: AngleSet) -> tuple[int, Callable[[Tensor], Tensor]]:
    """0 if the module returns cos first, 1 if sin; and how R/2 values become what it returns."""
    positions = torch.arange(4)
    first, second = angles.given(positions)
    frequencies, scaling = angles.at_length(len(positions))
    turns = positions[:, None].double() * frequencies.double()
    parts = (turns.cos() * scaling, turns.sin() * scaling)
    for order in (0, 1):
        for spread in (_halves, _pairs, _once):
            wanted = (spread(parts[order]), spread(parts[1 - order]))
            if all(_equal(found.double(), right) for found, right in zip((first, second), wanted, strict=True)):
                return order, spread
    raise UnsupportedModel(
        f"{model.config.model_type}: {type(angles.module).__name__} returns angles of shape {tuple(first.shape)} for 4 positions and "
        f"{len(frequencies)} frequencies, in a layout that the oracle does not know"
    )


def _equal(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool(torch.allclose(found, wanted, atol=1e-5))


def _fresh(rotary: Any) -> nn.Module:
    # One that keeps no configuration has a table, which no pass changes.
    fresh: nn.Module = type(rotary)(rotary.config) if hasattr(rotary, "config") else rotary
    return fresh


def _call(module: nn.Module, position_ids: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
    typed = {} if layer_type is None else {"layer_type": layer_type}
    first, second = module(torch.zeros(1), position_ids, **typed)
    return first, second
