"""Rotary frequencies of a stream.

Of most kinds of scaling the angles depend on the position alone. Those of two depend on the length of the sequence too: `dynamic` (NTK)
stretches its base once a sequence is longer than the trained context, `longrope` has short factors up to the original context and long ones
beyond. A stream has no length, but it has a reach: no token ever meets one that is further away than its cache is long. So a stream has the
angles, from its first token on, that transformers gives to a sequence of S + W tokens.

A model may have one set of rotary parameters or one for each type of its layers (Gemma 3); `kind` names the type, None the only set.
"""

from typing import Any

from sinkring.models.errors import UnsupportedModel
from sinkring.models.settings import rope_parameter_sets
from torch import Tensor

LENGTH_DEPENDENT = ("dynamic", "longrope")


def rope_length(config: Any, policy: str, sinks: int, window: int, kind: str | None = None) -> int:
    """Tokens of the sequence whose angles a stream has: S + W. A linear cache is sinks=0, window=its capacity.

    Raises UnsupportedModel for a length-dependent kind of rope and a stream in which tokens meet that lie further apart than one set of
    angles serves.
    """
    rope = rope_parameter_sets(config)[kind]
    rope_type = rope.get("rope_type", "default")
    length = sinks + window
    if rope_type not in LENGTH_DEPENDENT:
        return length
    if policy == "native" and sinks:
        raise UnsupportedModel(
            f"{config.model_type}: rope_type {rope_type!r} with policy native and sinks={sinks}: the distance to a sink grows without end, "
            "and the model's angles change with it; use policy streaming, or sinks=0, or a capacity"
        )
    original = original_context(config, kind)
    if rope_type == "dynamic" and length > original:
        raise UnsupportedModel(
            f"{config.model_type}: rope_type 'dynamic' with sinks={sinks} and window={window}: beyond {original} tokens its angles "
            f"change with every token; use at most {original} in all"
        )
    if rope_type == "longrope" and length > original and policy == "native":
        raise UnsupportedModel(
            f"{config.model_type}: rope_type 'longrope' with policy native and {length} tokens in the window: after {original} tokens the "
            f"model itself changes from its short factors to its long ones; use a window or capacity of at most {original}, or policy "
            "streaming, which has the long factors from the start"
        )
    return length


def original_context(config: Any, kind: str | None = None) -> int:
    """Tokens up to which a length-dependent kind of rope keeps its first angles."""
    rope = rope_parameter_sets(config)[kind]
    return int(config.max_position_embeddings if rope["rope_type"] == "dynamic" else rope["original_max_position_embeddings"])


def rope_frequencies(rotary: Any, length: int, kind: str | None = None) -> tuple[Tensor, float]:
    """inv_freq float32 [R/2] in radians per token, and the factor on cos and sin, of a rotary module for a sequence of `length` tokens.

    Raises UnsupportedModel unless all of them are finite and above 0.
    """
    inv_freq, scaling = _frequencies(rotary, length, kind)
    for name, values in (("angles per token", inv_freq), ("attention scaling", inv_freq.new_tensor([scaling]))):
        wrong = values[~(values.isfinite() & (values > 0))]
        if len(wrong):
            said = ", ".join(f"{key}={value!r}" for key, value in sorted(rope_parameter_sets(rotary.config)[kind].items()))
            raise UnsupportedModel(
                f"{rotary.config.model_type}: its rope parameters ({said}) give {len(wrong)} of {len(values)} {name} that are not finite "
                f"and above 0, the first is {float(wrong[0])}; correct rope_theta and the factors in config.json"
            )
    return inv_freq, scaling


def _frequencies(rotary: Any, length: int, kind: str | None) -> tuple[Tensor, float]:
    rope_type = rotary.rope_type if kind is None else rotary.rope_type[kind]
    prefix = "" if kind is None else f"{kind}_"
    if rope_type not in LENGTH_DEPENDENT:
        return getattr(rotary, f"{prefix}inv_freq"), float(getattr(rotary, f"{prefix}attention_scaling"))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Not the module's buffer: a forward pass overwrites it with the angles of whatever length it had.
    of_kind = {} if kind is None else {"layer_type": kind}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](rotary.config, None, seq_len=length, **of_kind)
    return inv_freq, float(scaling)
