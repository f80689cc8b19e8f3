"""Front end: a Hugging Face decoder in torch -> a step graph with one RingAttention node per layer.

The model's own code is traced, steered by `sinkring.exporter.hooks`: cos and sin come from exact tables, each layer's rotary embedding is
one node, its attention is one RingAttention node. Everything else, biases, norms, multipliers, is the model's and is traced as it stands.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from sinkring.exporter.angles import Angles
from sinkring.exporter.cache_plan import CachePlan, each_state, ring_names, updated_name
from sinkring.exporter.embedding_table import lookup_of
from sinkring.exporter.hooks import AttentionCall, hooked
from sinkring.exporter.node import DOMAIN, OP_TYPE
from sinkring.exporter.quick_trace import quick_trace
from sinkring.exporter.rotary import frequencies_for
from sinkring.models.registry import Family
from sinkring.models.token_call import text_config
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Role
from torch import Tensor
from torch.onnx.ops import symbolic_multi_out

TOKENS, EMBEDDINGS, POSITION, ROWS, LOGITS = "tokens", "embeddings", "position", "rows", "logits"
OPSET = 24


class _Step(torch.nn.Module):
    """The traced module: tokens [B,T] or embeddings [B,T,hidden], position [B], write indices [B], (rows [N]), rings -> logits [B,N,V],
    updated rings.
    """

    def __init__(self, model: Any, family: Family, plan: CachePlan, policy: str) -> None:
        super().__init__()
        self.model, self.family, self.plan, self.policy = model, family, plan, policy
        self.slopes = tuple(family.alibi_slopes(text_config(model)) or ()) if family.alibi_slopes else ()
        self.angles = torch.nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        for rope, geometry in plan.ropes().items():
            inv_freq, self.scaling[rope] = frequencies_for(model, family, rope, policy, geometry)
            self.angles[f"angles_{rope}"] = Angles(inv_freq)
        for index, ring in enumerate(plan.rings):
            # From this position on, a sink would lie further back than the model's cache is long.
            clamp = ring.geometry.sinks_tokens + ring.geometry.window_tokens - 1
            self.register_buffer(f"clamp{index}", torch.tensor(clamp, dtype=torch.int64))

    def forward(
        self, fed: Tensor, position: Tensor, write_index: list[Tensor], rows: Tensor | None, rings: list[Tensor]
    ) -> tuple[Tensor, ...]:
        call = _Call(self, fed, position, write_index, rings)
        with hooked(self.model, self.family, call.angles, call.attend):
            logits = self.family.run(self.model, fed, call.positions, rows)
        return (logits.float(), *call.updated_rings())


class _Call:
    """One call that is traced: makes each set of angles and of shifts once, and collects the updated rings."""

    def __init__(self, step: _Step, fed: Tensor, position: Tensor, write_index: list[Tensor], rings: list[Tensor]) -> None:
        self.step, self.position, self.write_index, self.rings = step, position, write_index, rings
        self.positions = position[:, None] + torch.arange(fed.shape[1])[None, :]
        self.updated: list[Tensor | None] = [None] * len(rings)
        self.made: dict[tuple[str, int | None], tuple[Tensor, Tensor]] = {}

    def angles(self, rope: str) -> tuple[Tensor, Tensor]:
        """cos, sin [B,T,R/2] of the tokens' positions; of a set that no layer turns by, as Falcon's with ALiBi, anything."""
        if rope not in self.step.scaling:
            return torch.ones(1), torch.zeros(1)
        if (rope, None) not in self.made:
            cos, sin = self._table(rope)(self.positions)
            scaling = self.step.scaling[rope]
            self.made[rope, None] = (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)
        return self.made[rope, None]

    def attend(self, call: AttentionCall) -> Tensor:
        """One RingAttention node: attended [B,H,T,D]."""
        plan, layer = self.step.plan, call.layer
        observed = plan.layers[layer].rope
        assert call.rope == observed, f"layer {layer} turns by {call.rope!r}, and by {observed!r} when it was observed"
        ring = plan.ring_of(layer)
        geometry = plan.rings[ring].geometry
        k, v = 2 * layer, 2 * layer + 1
        # Without sinks, and where nothing says how far away a token is, the policies are one.
        clamped = self.step.policy == "streaming" and geometry.sinks_tokens > 0 and (call.rope is not None or bool(self.step.slopes))
        shift = self._shift(call.rope, ring) if clamped and call.rope is not None else (None, None)
        inputs: list[Tensor | None] = [
            # Attention is float32 whatever the model is: scores and shares are sums of many products.
            call.query.float(),
            call.key.float(),
            call.value.float(),
            self.rings[k],
            self.rings[v],
            self.position,
            self.write_index[ring],
        ]
        inputs += [*shift, None if call.sink_logits is None else call.sink_logits.float()]
        while inputs[-1] is None:
            inputs.pop()
        attributes: dict[str, Any] = {
            "sinks": geometry.sinks_tokens,
            "window": geometry.window_tokens,
            "slots": geometry.slots,
            "scale": call.scale,
            "interleaved": int(self.step.family.interleaved),
            "policy": "streaming" if clamped else "native",
        }
        if call.softcap:
            attributes["softcap"] = call.softcap
        if self.step.slopes:
            attributes["alibi_slopes"] = list(self.step.slopes)
        attended, self.updated[k], self.updated[v] = symbolic_multi_out(
            f"{DOMAIN}::{OP_TYPE}",
            inputs,
            attributes,
            dtypes=[torch.float32, self.rings[k].dtype, self.rings[v].dtype],
            shapes=[call.query.shape, self.rings[k].shape, self.rings[v].shape],
            version=1,
        )
        return attended.to(call.query.dtype)

    def updated_rings(self) -> tuple[Tensor, ...]:
        missing = [index // 2 for index, ring in enumerate(self.updated) if ring is None]
        assert not missing, f"layers {missing} never called the attention function"
        return tuple(ring for ring in self.updated if ring is not None)

    def _shift(self, rope: str, ring: int) -> tuple[Tensor, Tensor]:
        """cos, sin [B,T,R/2] of the negative angle that turns a query back to meet the sinks of `ring`."""
        if (rope, ring) not in self.made:
            clamp = getattr(self.step, f"clamp{ring}")
            cos, sin = self._table(rope)((self.positions - clamp).clamp(min=0))
            self.made[rope, ring] = (cos, -sin)
        return self.made[rope, ring]

    def _table(self, rope: str) -> torch.nn.Module:
        return self.step.angles[f"angles_{rope}"]


def trace_step(
    model: Any,
    family: Family,
    plan: CachePlan,
    *,
    role: Role,
    policy: str,
    batch: int,
    chunk: int,
    cache_dtype: torch.dtype = torch.float32,
    embedded: bool = False,
) -> ir.Model:
    """Trace one step of `model` (on the CPU, in its own dtype but for attention, angles and logits) with caches of `cache_dtype`.

    embedded: the step is fed embedded rows, float32 [B,T,hidden], and not token ids.

    role "decode": T = 1, batch rows, all static; logits [B,1,V]. role "prefill": batch 1, T dynamic in 1 .. chunk, and an input `rows`
    int64 [N]: which of the T tokens' logits are wanted; logits [1,N,V].
    """
    rows_count = batch if role == "decode" else 1
    tokens = 1 if role == "decode" else max(chunk, 2)
    step = _Step(model, family, plan, policy).eval()
    rings = []
    for layer, ring, _ in each_state(plan):
        seen, geometry = plan.layers[layer], plan.rings[ring].geometry
        rings.append(torch.zeros(rows_count, seen.kv_heads, geometry.capacity, seen.head_size, dtype=cache_dtype))
    rows = torch.tensor([0, tokens - 1]) if role == "prefill" else None
    if embedded:
        fed = torch.zeros(rows_count, tokens, text_config(model).hidden_size)
    else:
        fed = torch.zeros(rows_count, tokens, dtype=torch.int64)
    name = EMBEDDINGS if embedded else TOKENS
    args = (
        fed,
        torch.zeros(rows_count, dtype=torch.int64),
        [torch.zeros(rows_count, dtype=torch.int64) for _ in plan.rings],
        rows,
        rings,
    )
    ring_inputs = [name for layer in range(len(plan.layers)) for name in ring_names(layer)]
    write_indices = [ring.write_index for ring in plan.rings]
    dynamic = None
    if role == "prefill":
        steps, wanted = torch.export.Dim("T", min=1), torch.export.Dim("N", min=1)
        dynamic = ({1: steps}, None, [None] * len(write_indices), {0: wanted}, [None] * len(rings))
    with torch.no_grad(), _quiet_exporter(), quick_trace():
        program = torch.onnx.export(
            step,
            args,
            dynamo=True,
            opset_version=OPSET,
            input_names=[name, POSITION, *write_indices, *([ROWS] if role == "prefill" else []), *ring_inputs],
            output_names=[LOGITS, *map(updated_name, ring_inputs)],
            dynamic_shapes=dynamic,
            verbose=False,
            optimize=False,
        )
    assert program is not None
    _check_every_weight_is_used(model, program.model, lookup_of(model, family) if embedded else None)
    if role == "prefill":
        _name_dynamic_axes(program.model, {name: (1, "T"), ROWS: (0, "N")})
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


def _check_every_weight_is_used(model: Any, traced: ir.Model, beside: torch.nn.Module | None) -> None:
    """A weight that the graph does not read would be a part of the model that was dropped without a word. beside: what the host reads."""
    tables = [] if beside is None else [id(table) for table in beside.parameters()]
    used = {name for name, value in traced.graph.initializers.items() if value.uses()}
    dropped = [
        name
        for name, weight in model.named_parameters()
        if id(weight) not in tables and not {f"model.{alias}" for alias in _aliases(model, name)} & used
    ]
    if dropped:
        raise UnsupportedError(
            f"{len(dropped)} weights of the model do not reach the graph, the first is {dropped[0]}: this model is not supported"
        )


def _aliases(model: Any, name: str) -> list[str]:
    """All names of one parameter: a tied head has several."""
    parameter = model.get_parameter(name)
    return [alias for alias, other in model.named_parameters(remove_duplicate=False) if other is parameter]
