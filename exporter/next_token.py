"""The likeliest next token as one more output of a decode engine, so that a greedy loop can feed it back without the host.

It is added to the parsed network and not to the ONNX graph, which stays, byte for byte, the file that was proven.
"""

from types import ModuleType
from typing import Any

from sinkring.runtime.contract import NEXT_TOKEN

_LAST_AXIS = 1 << 2


def add_next_token(trt: ModuleType, network: Any) -> None:
    """Append `next_token` int64 [B,1] = argmax of `logits` [B,1,V] to the network of a decode graph; a prefill one stays as it is."""
    outputs = {tensor.name: tensor for tensor in map(network.get_output, range(network.num_outputs))}
    shape = tuple(outputs["logits"].shape) if "logits" in outputs else ()
    if len(shape) != 3 or shape[1] != 1:
        return
    indices = network.add_topk(outputs["logits"], trt.TopKOperation.MAX, 1, _LAST_AXIS).get_output(1)
    squeezed = network.add_shuffle(indices)
    squeezed.reshape_dims = trt.Dims((shape[0], 1))
    # The type of the graph's own `tokens`, so that a copy of its bytes is the next input.
    token = network.add_cast(squeezed.get_output(0), trt.DataType.INT64).get_output(0)
    token.name = NEXT_TOKEN
    network.mark_output(token)
