"""Front end: a Hugging Face decoder in torch -> a step graph with one RingAttention node per layer.

The model's own code is traced; only three things are hooked, each for the time of the trace: the rotary module (cos and sin from exact
tables), `apply_rotary_pos_emb` of its modeling file (one RotaryEmbedding node), and the attention function (one RingAttention node).
Everything else, biases, norms, multipliers, is the model's and is traced as it stands. Whatever touches transformers' internals is here.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import torch
from sinkring.exporter.angles import Angles
from sinkring.exporter.node import DOMAIN, OP_TYPE
from sinkring.models.registry import DecoderShape, Family
from sinkring.models.rope import rope_frequencies, rope_length
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Role
from sinkring.runtime.ring import RingGeometry
from torch.onnx.ops import rotary_embedding, symbolic_multi_out

ATTENTION = "sinkring_ring_attention"
TOKENS, POSITION, ROWS, LOGITS = "tokens", "position", "rows", "logits"
OPSET = 24


def ring_names(layer: int) -> tuple[str, str]:
    """Names of a layer's two ring inputs; the updated ring is the output `NAME.updated`."""
    return f"cache.{layer}.k", f"cache.{layer}.v"


def updated_name(state: str) -> str:
    return f"{state}.updated"


def write_index_name(ring: int) -> str:
    return f"write_index.{ring}"


@dataclass
class _Trace:
    """What the attention hook needs to know about the call being traced, and what it hands back."""

    position: torch.Tensor
    write_index: torch.Tensor
    shift: tuple[torch.Tensor, torch.Tensor] | None
    rings: list[torch.Tensor]
    updated: list[torch.Tensor | None]
    geometry: RingGeometry
    policy: str


class _Step(torch.nn.Module):
    """The traced module: tokens [B,T], position [B], write index [B], (rows [N]), rings -> logits [B,N,V], updated rings."""

    clamp: torch.Tensor

    def __init__(self, model: Any, family: Family, geometry: RingGeometry, policy: str) -> None:
        super().__init__()
        self.model = model
        self.geometry, self.policy = geometry, policy
        rotary = attrgetter(family.rotary)(model)
        length = rope_length(model.config, policy, geometry.sinks_tokens, geometry.window_tokens)
        frequencies, self.attention_scaling = rope_frequencies(rotary, length)
        self.angles = Angles(frequencies)
        first_attention = attrgetter(family.layers)(model)[0].self_attn
        self.modeling = sys.modules[type(first_attention).__module__]
        self.rotary_class = type(rotary)
        # From this position on, a sink would lie further back than the model's cache is long.
        clamp = geometry.sinks_tokens + geometry.window_tokens - 1
        self.register_buffer("clamp", torch.tensor(clamp, dtype=torch.int64))

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, write_index: torch.Tensor, rows: torch.Tensor | None, rings: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        positions = position[:, None] + torch.arange(tokens.shape[1])[None, :]
        cos, sin = self.angles(positions)
        shift = None
        if self.policy == "streaming" and self.geometry.sinks_tokens:
            shift_cos, shift_sin = self.angles((positions - self.clamp).clamp(min=0))
            shift = (shift_cos, -shift_sin)
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        trace = _Trace(position, write_index, shift, rings, [None] * len(rings), self.geometry, self.policy)
        with self._hooked(trace, cos, sin):
            logits = self.model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            ).logits
        missing = [index // 2 for index, ring in enumerate(trace.updated) if ring is None]
        assert not missing, f"layers {missing} never called the attention function"
        return (logits, *(ring for ring in trace.updated if ring is not None))

    @contextmanager
    def _hooked(self, trace: _Trace, cos: torch.Tensor, sin: torch.Tensor) -> Iterator[None]:
        def ring_attention(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
        ) -> tuple[torch.Tensor, None]:
            k, v = 2 * module.layer_idx, 2 * module.layer_idx + 1
            geometry = trace.geometry
            attended, trace.updated[k], trace.updated[v] = symbolic_multi_out(
                f"{DOMAIN}::{OP_TYPE}",
                [query, key, value, trace.rings[k], trace.rings[v], trace.position, trace.write_index, *(trace.shift or ())],
                {
                    "sinks": geometry.sinks_tokens,
                    "window": geometry.window_tokens,
                    "slots": geometry.slots,
                    "scale": float(scaling),
                    "interleaved": 0,
                    "policy": "streaming" if trace.shift else "native",
                },
                dtypes=[query.dtype, key.dtype, value.dtype],
                shapes=[query.shape, trace.rings[k].shape, trace.rings[v].shape],
                version=1,
            )
            return attended.transpose(1, 2), None

        def apply_rotary(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> tuple[Any, Any]:
            return rotary_embedding(query, cos, sin), rotary_embedding(key, cos, sin)

        from transformers import AttentionMaskInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, ring_attention)
        AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = ATTENTION
        try:
            with (
                patch.object(self.modeling, "apply_rotary_pos_emb", apply_rotary),
                patch.object(self.rotary_class, "forward", lambda *_, **__: (cos, sin)),
            ):
                yield
        finally:
            self.model.config._attn_implementation = before


def trace_step(
    model: Any, family: Family, shape: DecoderShape, geometry: RingGeometry, *, role: Role, policy: str, batch: int, chunk: int
) -> ir.Model:
    """Trace one step of `model` (float32, on the CPU).

    role "decode": T = 1, batch rows, all static; logits [B,1,V]. role "prefill": batch 1, T dynamic in 1 .. chunk, and an input `rows`
    int64 [N]: which of the T tokens' logits are wanted; logits [1,N,V].
    """
    rows_count = batch if role == "decode" else 1
    tokens = 1 if role == "decode" else max(chunk, 2)
    step = _Step(model, family, geometry, policy).eval()
    rings = [
        torch.zeros(rows_count, shape.kv_heads, geometry.capacity, shape.head_size, dtype=torch.float32) for _ in range(2 * shape.layers)
    ]
    rows = torch.tensor([0, tokens - 1]) if role == "prefill" else None
    args = (
        torch.zeros(rows_count, tokens, dtype=torch.int64),
        torch.zeros(rows_count, dtype=torch.int64),
        torch.zeros(rows_count, dtype=torch.int64),
        rows,
        rings,
    )
    ring_inputs = [name for layer in range(shape.layers) for name in ring_names(layer)]
    dynamic = None
    if role == "prefill":
        dynamic = ({1: torch.export.Dim("T", min=1)}, None, None, {0: torch.export.Dim("N", min=1)}, [None] * len(rings))
    with torch.no_grad(), _quiet_exporter():
        program = torch.onnx.export(
            step,
            args,
            dynamo=True,
            opset_version=OPSET,
            input_names=[TOKENS, POSITION, write_index_name(0), *([ROWS] if role == "prefill" else []), *ring_inputs],
            output_names=[LOGITS, *map(updated_name, ring_inputs)],
            dynamic_shapes=dynamic,
            verbose=False,
            optimize=False,
        )
    assert program is not None
    _check_every_weight_is_used(model, program.model)
    if role == "prefill":
        _name_dynamic_axes(program.model, {TOKENS: (1, "T"), ROWS: (0, "N")})
    return program.model


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Without what torch's exporter says to its own developers: deprecations, and libraries that nothing here uses."""
    logger = logging.getLogger("torch.onnx._internal.exporter")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="copyreg", category=FutureWarning)
            warnings.filterwarnings("ignore", module=r"torch\.onnx", category=UserWarning)
            yield
    finally:
        logger.setLevel(level)


def _name_dynamic_axes(traced: ir.Model, axes: dict[str, tuple[int, str]]) -> None:
    """Give the symbolic sizes of the named inputs' axes their names, wherever the graph's shapes mention them."""
    names = {}
    for value in traced.graph.inputs:
        if value.name in axes:
            axis, name = axes[value.name]
            assert value.shape is not None
            names[str(value.shape[axis])] = name
    values = [*traced.graph.inputs, *(output for node in traced.graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(names.get(str(size), size) for size in value.shape)


def _check_every_weight_is_used(model: Any, traced: ir.Model) -> None:
    """A weight that the graph does not read would be a part of the model that was dropped without a word."""
    used = {name for name, value in traced.graph.initializers.items() if value.uses()}
    dropped = [name for name, _ in model.named_parameters() if not {f"model.{alias}" for alias in _aliases(model, name)} & used]
    if dropped:
        raise UnsupportedError(
            f"{len(dropped)} weights of the model do not reach the graph, the first is {dropped[0]}: this model is not supported"
        )


def _aliases(model: Any, name: str) -> list[str]:
    """All names of one parameter: a tied head has several."""
    parameter = model.get_parameter(name)
    return [alias for alias, other in model.named_parameters(remove_duplicate=False) if other is parameter]
