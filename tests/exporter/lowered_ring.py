"""Each lowering of a graph with one RingAttention node, run in ONNX Runtime: against the node's reference and against plain attention."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from sinkring.exporter.node import ring_attention
from sinkring.exporter.passes.lower_fused import LowerToFusedAttention
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lower_heads import LowerToHeadAttention

from tests.exporter.ring_case import RingCase, make_call, ring_model, session

FORMS = {"fused": LowerToFusedAttention, "grouped": LowerToGroupedAttention, "heads": LowerToHeadAttention}
# Scores reach 100 at scale 1.0, where float32 resolves 1e-5: through the exponential that share of a weight, over values of up to 4.
TOLERANCE = 2e-4

every_form = pytest.mark.parametrize("form", sorted(FORMS))
every_policy = pytest.mark.parametrize("policy", ["native", "streaming"])


def lowered(form: str, case: RingCase) -> ir.Model:
    model = ring_model(case)
    FORMS[form]()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def check(form: str, case: RingCase, lengths: list[int], to_plain: float = TOLERANCE, to_reference: float = TOLERANCE) -> None:
    """Run one graph from every start, each row of the batch from another one; the largest errors allowed are absolute."""
    graph = session(lowered(form, case))
    for tokens in lengths:
        starts = case.starts(tokens)
        for index in range(len(starts)):
            rows = [starts[(index + 3 * row) % len(starts)] for row in range(case.batch)]
            call = make_call(case, rows, tokens, seed=index)
            outputs = graph.run(None, call.inputs)
            reference = ring_attention(case.attributes, **call.inputs)[0]
            plain = ("plain attention", call.error(outputs), to_plain)
            for name, error, allowed in (plain, ("the reference", float(np.abs(outputs[0] - reference).max()), to_reference)):
                assert error <= allowed, f"{form} of {case} from {rows}, T={tokens}: {error:.2g} off {name}, allowed {allowed:.2g}"


def two_layers(first: RingCase, second: RingCase, share: bool) -> ir.Model:
    """One graph of two nodes, the names of whose values end in .0 and .1. share: they read the same position and write index."""
    models = [ring_model(case) for case in (first, second)]
    nodes, inputs, outputs = [], [], []
    for index, model in enumerate(models):
        node = model.graph.node(0)
        for value in (*model.graph.inputs, *model.graph.outputs):
            value.name = f"{value.name}.{index}"
        if share and index:
            for place in (5, 6):
                node.replace_input_with(place, nodes[0].inputs[place])
        inputs += [value for value in model.graph.inputs if value.uses()]
        outputs += list(model.graph.outputs)
        model.graph.inputs.clear()
        model.graph.outputs.clear()
        model.graph.remove(node)
        nodes.append(node)
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports=models[0].opset_imports, name="two_nodes")
    return ir.Model(graph, ir_version=10)
