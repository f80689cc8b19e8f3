"""Families sinkring can export: a lookup from a configuration's `model_type` to what is special about it."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, Literal

from sinkring.models.errors import UnsupportedModel
from sinkring.models.refused import refuse_by_name
from sinkring.models.settings import check_settings

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


Windows = Literal["no", "some layers", "some layers, if set", "all layers", "all layers, if set"]

# A decode step's attention in the plan of TensorRT-RTX, as docs/results/plan-families.json has it: each cache in place, none copied.
FUSED = "one fused kernel a layer"
BY_HEAD = "two products a layer, read in place"


@dataclass(frozen=True)
class Family:
    """How one architecture is read: a file of `models/families` says how it differs from these defaults, and no more.

    Most decoders of transformers turn queries and keys with their file's `apply_rotary_pos_emb` and attend through its registry of
    attention functions; what they hand over there (scale, window, softcap, learned sinks) is read from the call and not said here.

    name: `model_type` of the configuration. examples: checkpoints that a user knows. special: what sets it apart from Llama.
    since: the transformers whose code of it is the one that is known here, where that is not the oldest supported.
    windows: which layers have a trained sliding window, of the configuration's size; "if set": where it has one.
    plan: a decode step's attention in the plan of TensorRT-RTX.
    layers, attention: attribute path of the list of layers, from the causal LM, and name of a layer's attention.
    rotary: attribute path of the module that makes cos and sin; None for a model that turns nothing.
    frequencies: of a rotary module that keeps none, float32 [R/2] in radians per token.
    partial: the rotary module heeds `partial_rotary_factor`, so that R of a head's D entries turn.
    interleaved: rotary pairs are entries 2i and 2i+1 of a head, not i and i + R/2.
    swapped: the rotary module returns (sin, cos), and the function that turns takes (tensor, sin, cos) with a tensor [B,T,H,R].
    window: trained window of each layer in tokens, None for full attention, where the attention call does not say it.
    context: tokens of the longest sequence in training, where that is not `max_position_embeddings`.
    alibi_slopes: slopes [H] of a model with linear biases, as they are added to the scaled scores: -slope * distance.
    forward: stands in for the attention's own `forward` where that does not go through the registry: called with
    (attend, rotate, module, *args, **kwargs), attend(module, query [B,H,T,D], key [B,G,T,D], value [B,G,T,D], scale) -> [B,T,H*D].
    beside_tokens: what a step takes beside a token id, so that its graphs take embedded rows; nothing in most.
    step: stands in for a call of the model: (model, {input_ids [B,T] or inputs_embeds [B,T,hidden]}, positions, rows) -> logits; see `run`.
    lookup: of a model, the module that makes a row of each id, where that is not what transformers calls its input embeddings.
    codebooks: of a configuration, what `runtime.manifest.Codebooks` has, for a model that adds rows of audio codes.
    """

    name: str
    examples: str
    special: str = ""
    since: str = ""
    windows: Windows = "no"
    plan: str = FUSED
    rope_types: tuple[str, ...] = ROPE_TYPES
    layers: str = "model.layers"
    attention: str = "self_attn"
    rotary: str | None = "model.rotary_emb"
    frequencies: Callable[[Any], Any] | None = None
    partial: bool = False
    interleaved: bool = False
    swapped: bool = False
    window: Callable[[Any], tuple[int | None, ...]] | None = None
    context: Callable[[Any], int] | None = None
    alibi_slopes: Callable[[Any], tuple[float, ...] | None] | None = None
    forward: Callable[..., Any] | None = None
    beside_tokens: str = ""
    step: Callable[..., Any] | None = None
    lookup: Callable[[Any], Any] | None = None
    codebooks: Callable[[Any], dict[str, int]] | None = None

    def run(self, model: Any, fed: Any, positions: Any, rows: Any) -> Any:
        """Logits [B,T,V], or [B,N,V] of the tokens `rows` int64 [N], for ids int64 [B,T] or float32 [B,T,hidden] at `positions` [B,T]."""
        given = {"inputs_embeds": fed.to(model.dtype)} if fed.is_floating_point() else {"input_ids": fed}
        if self.step is not None:
            return self.step(model, given, positions, rows)
        return model(**given, position_ids=positions, use_cache=False, logits_to_keep=0 if rows is None else rows).logits


@cache
def families() -> dict[str, Family]:
    """Every family by name: those of the files of `models/families`."""
    package = import_module("sinkring.models.families")
    modules = [import_module(f"{package.__name__}.{entry.name}") for entry in pkgutil.iter_modules(package.__path__)]
    found = [family for module in modules for family in vars(module).values() if isinstance(family, Family)]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def find_family(config: Any) -> Family:
    """The family of a Hugging Face configuration. Raises UnsupportedModel, naming the supported ones, or what in it is not honoured."""
    family = families().get(config.model_type)
    if family is None:
        refuse_by_name(config.model_type)
        raise UnsupportedModel(f"architecture {config.model_type!r} is not supported; supported: {', '.join(families())}")
    if not supported_here(family):
        raise UnsupportedModel(
            f"architecture {config.model_type!r} needs transformers >= {family.since}, here is {version('transformers')}: install that one"
        )
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        check_settings(part, family.rope_types if family.rotary else (), family.partial)
    return family


def supported_here(family: Family) -> bool:
    """Whether the installed transformers is new enough for it."""
    return not family.since or _numbers(version("transformers")) >= _numbers(family.since)


def _numbers(said: str) -> tuple[int, ...]:
    return tuple(int(part) for part in said.split(".")[:2])


def context_tokens(config: Any, family: Family) -> int:
    """Tokens of the longest sequence the model was trained for."""
    return int(family.context(config) if family.context else config.get_text_config().max_position_embeddings)
