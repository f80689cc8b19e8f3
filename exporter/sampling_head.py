"""A sampling head behind the logits of a decode graph: the next token by top-k and temperature, picked without the host.

In the order of sampling.py: of the K largest logits those of rank below top_k, weights exp((logit - max) / temperature), and the token at
which the running sum of the weights, in order of token id, first passes draw * total. Instead of sorting K ids and summing in a loop, which
a CUDA graph could not capture, each id's running sum is one masked sum over K: the token is the lowest id whose sum passes.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sinkring.runtime.contract import NEXT_TOKEN
from sinkring.runtime.device_sampling import DRAW, DRAW_UNIT, TEMPERATURE, TEMPERATURE_UNIT, TOP_K

_PREFIX = "sample"


def append_sampling_head(model: onnx.ModelProto, most_top_k: int) -> onnx.ModelProto:
    """A copy of a decode graph, its weights where they lie, with the output `next_token` int64 [B,1] and the inputs of device_sampling.

    most_top_k: K. Logits are float32 [B,1,V]. The graph's own nodes, inputs and outputs stay as they are.
    """
    headed = onnx.ModelProto()
    headed.CopyFrom(model)
    graph = headed.graph
    (logits,) = [output for output in graph.output if output.name == "logits"]
    batch, _, vocab = (dim.dim_value for dim in logits.type.tensor_type.shape.dim)
    kept = min(most_top_k, vocab)
    # Ids are compared as float32.
    assert vocab <= 1 << 24, f"vocabulary {vocab}"

    def constant(name: str, value: object, dtype: type = np.float32) -> str:
        graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), f"{_PREFIX}.{name}"))
        return f"{_PREFIX}.{name}"

    def node(operator: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        names = [output if output == NEXT_TOKEN else f"{_PREFIX}.{output}" for output in outputs]
        graph.node.append(helper.make_node(operator, inputs, names, f"{_PREFIX}.node_{names[0]}", **attributes))
        return names[0]

    for name in (DRAW, TEMPERATURE, TOP_K):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, [batch]))
    zero, last = constant("zero", 0.0), constant("last_axis", [-1], np.int64)
    one_row = constant("one_row", [batch, 1, 1], np.int64)

    def number(name: str, unit: float) -> str:
        """[B] whole -> float32 [B,1,1]."""
        column = node("Cast", [node("Reshape", [name, one_row], f"{name}.column")], f"{name}.float", to=TensorProto.FLOAT)
        return node("Mul", [column, constant(f"{name}.unit", unit)], f"{name}.number")

    node("TopK", ["logits", constant("k", [kept], np.int64)], "values", "ids", axis=-1)
    values, ids = f"{_PREFIX}.values", node("Cast", [f"{_PREFIX}.ids"], "float_ids", to=TensorProto.FLOAT)
    largest = node("ReduceMax", [values, last], "largest", keepdims=1)
    scaled = node("Div", [node("Sub", [values, largest], "shifted"), number(TEMPERATURE, TEMPERATURE_UNIT)], "scaled")
    ranks = constant("ranks", np.arange(kept).reshape(1, 1, kept))
    within = node("Less", [ranks, number(TOP_K, 1.0)], "within")
    weights = node("Where", [within, node("Exp", [scaled], "weights"), zero], "kept")
    row = node("Reshape", [ids, constant("row", [batch, 1, 1, kept], np.int64)], "ids_row")
    column = node("Reshape", [ids, constant("column", [batch, 1, kept, 1], np.int64)], "ids_column")
    weights_row = node("Reshape", [weights, f"{_PREFIX}.row"], "weights_row")
    summed = node("Where", [node("LessOrEqual", [row, column], "up_to"), weights_row, zero], "masked")
    running = node("ReduceSum", [summed, last], "running", keepdims=0)
    target = node("Mul", [node("ReduceMax", [running, last], "total", keepdims=1), number(DRAW, DRAW_UNIT)], "target")
    passed = node("Where", [node("Greater", [running, target], "passes"), ids, constant("no_id", float(vocab - 1))], "candidates")
    lowest = node("ReduceMin", [passed, last], "lowest", keepdims=0)
    node("Cast", [lowest], NEXT_TOKEN, to=TensorProto.INT64)
    graph.output.append(helper.make_tensor_value_info(NEXT_TOKEN, TensorProto.INT64, [batch, 1]))
    return headed
