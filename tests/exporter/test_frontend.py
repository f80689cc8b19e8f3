"""The front end alone: a traced step graph, run with the node's reference, is the model; the model itself is left as it was."""

import gc
import weakref
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from sinkring.exporter.cache_plan import CachePlan, observe_layers, ring_names, updated_name
from sinkring.exporter.frontend import trace_step
from sinkring.exporter.node import DOMAIN, OP_TYPE
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.models.registry import find_family
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Policy, Ring, Role
from sinkring.runtime.ring import RingGeometry
from transformers.models.llama import modeling_llama

from tests.exporter.run_traced import TracedStep
from tests.models.tiny import tiny_llama
from tests.parity.closeness import assert_loudly_wrong, assert_parity

GEOMETRY = RingGeometry(2, 4, 6)


def trace(model: Any, role: Role = "decode", policy: Policy = "streaming", geometry: RingGeometry = GEOMETRY, batch: int = 1) -> ir.Model:
    family = find_family(model.config)
    caches = CachePlan(observe_layers(model, family, 256), (Ring("write_index.0", geometry, tuple(range(model.config.num_hidden_layers))),))
    return trace_step(model, family, caches, role=role, policy=policy, batch=batch, chunk=3)


def ring_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OP_TYPE)]


def shapes(values: Any) -> dict[str, tuple[Any, ...]]:
    return {value.name: tuple(size if isinstance(size, int) else "any" for size in value.shape) for value in values}


def test_a_model_that_was_hooked_is_freed_with_its_last_user() -> None:
    model = tiny_llama()
    observe_layers(model, find_family(model.config), 256)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("policy", ["native", "streaming"])
def test_decode_is_the_model(policy: Policy) -> None:
    model = tiny_llama()
    texts = [torch.randint(0, 97, (26,), generator=torch.Generator().manual_seed(row)) for row in range(2)]
    oracle = masked_dense_logits if policy == "native" else streaming_logits
    expected = [oracle(model, ids, 2, 4).numpy() for ids in texts]
    step = TracedStep(trace(model, policy=policy, batch=2), GEOMETRY)
    # The second row is one step behind and idles first: what it writes into slot 0 then is overwritten by its first token.
    for position in range(26):
        rows = [position, max(0, position - 1)]
        logits = step.feed(np.array([[int(ids[at])] for ids, at in zip(texts, rows, strict=True)]), rows)
        for row, at in enumerate(rows):
            assert_parity(logits[row, 0], expected[row][at], what=f"row {row} at {at}")
    other = (streaming_logits if policy == "native" else masked_dense_logits)(model, texts[0], 2, 4).numpy()
    assert_loudly_wrong(expected[0], other, "the other policy")


def test_prefill_is_the_model_and_gives_the_rows_asked_for() -> None:
    model = tiny_llama(seed=3)
    ids = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(9))
    expected = streaming_logits(model, ids, 2, 4).numpy()
    step = TracedStep(trace(model, role="prefill"), GEOMETRY)
    start = 0
    while start < 24:
        length = min(1 + start % 3, 24 - start, GEOMETRY.room(start))
        rows = list(range(length))[::-1] if start % 2 else [length - 1]
        logits = step.feed(ids[None, start : start + length].numpy(), [start], rows)
        assert_parity(logits[0], expected[[start + row for row in rows]], what=f"{length} tokens from {start}")
        start += length


def test_interface_of_decode() -> None:
    graph = trace(tiny_llama(), batch=2).graph
    rings = {name: (2, 2, 8, 8) for layer in range(2) for name in ring_names(layer)}
    assert shapes(graph.inputs) == {"tokens": (2, 1), "position": (2,), "write_index.0": (2,), **rings}
    assert shapes(graph.outputs) == {"logits": (2, 1, 97), **{updated_name(name): shape for name, shape in rings.items()}}
    for value in (*graph.inputs, *graph.outputs):
        assert value.dtype == (ir.DataType.INT64 if value.name in ("tokens", "position", "write_index.0") else ir.DataType.FLOAT)


def test_interface_of_prefill() -> None:
    graph = trace(tiny_llama(), role="prefill", batch=2).graph
    rings = {name: (1, 2, 8, 8) for layer in range(2) for name in ring_names(layer)}
    assert shapes(graph.inputs) == {"tokens": (1, "any"), "position": (1,), "write_index.0": (1,), "rows": ("any",), **rings}
    assert shapes(graph.outputs)["logits"] == (1, "any", 97)


@pytest.mark.parametrize(("policy", "sinks", "turned"), [("native", 2, False), ("streaming", 2, True), ("streaming", 0, False)])
def test_one_node_a_layer_says_what_was_asked_for(policy: Policy, sinks: int, turned: bool) -> None:
    geometry = RingGeometry(sinks, 4, 6)
    nodes = ring_nodes(trace(tiny_llama(layers=3), policy=policy, geometry=geometry))
    assert len(nodes) == 3
    for layer, node in enumerate(nodes):
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        assert attributes.pop("scale") == pytest.approx(8**-0.5)
        assert attributes == {
            "sinks": sinks,
            "window": 4,
            "slots": 6,
            "interleaved": 0,
            "policy": "streaming" if turned else "native",
        }
        assert len(node.inputs) == (9 if turned else 7)
        assert [node.inputs[index].name for index in (3, 4)] == list(ring_names(layer))  # type: ignore[union-attr]
        assert [node.outputs[index].name for index in (1, 2)] == [updated_name(name) for name in ring_names(layer)]


def test_the_model_is_left_as_it_was() -> None:
    model, ids = tiny_llama(), torch.arange(12)[None]
    before, implementation = model(ids).logits, model.config._attn_implementation
    rotate, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRotaryEmbedding.forward
    trace(model)
    assert modeling_llama.apply_rotary_pos_emb is rotate
    assert modeling_llama.LlamaRotaryEmbedding.forward is forward
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids).logits, before)


def test_a_weight_that_does_not_reach_the_graph_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.forgotten = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"1 weights .* model\.layers\.1\.mlp\.forgotten"):
        trace(model)


def test_a_tied_head_counts_as_used() -> None:
    assert len(ring_nodes(trace(tiny_llama(tied=True)))) == 2
