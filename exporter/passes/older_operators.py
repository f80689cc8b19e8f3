"""What TensorRT 10.3 does not parse -> what it stands for: RMSNormalization and RotaryEmbedding, both of opset 23, and Clip of integers."""

import numpy as np
import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value


class OlderOperators(ir.passes.InPlacePass):
    """Ensures that none of the three is left. Their inputs have shapes, of which only B and T may vary."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        ways = {"RMSNormalization": _norm, "RotaryEmbedding": _turn, "Clip": _clip}
        found = [node for node in model.graph if node.op_type in ways and not node.domain and not _is_float_clip(node)]
        for node in found:
            into = Insertion(model.graph, node)
            made, old = ways[node.op_type](into, node), node.outputs[0]
            made.shape, made.type = old.shape, old.type
            into.commit()
            replace_value(old, made)
            model.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, modified=bool(found))


def _is_float_clip(node: ir.Node) -> bool:
    """A Clip that is parsed as it is."""
    return node.op_type == "Clip" and node.outputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def _clip(into: Insertion, node: ir.Node) -> ir.Value:
    value, least, most = [*node.inputs, None, None][:3]
    assert value is not None, "the operator needs an input"
    if least is not None:
        value = into.op("Max", value, least)
    return value if most is None else into.op("Min", value, most)


def _norm(into: Insertion, node: ir.Node) -> ir.Value:
    """x / sqrt(mean(x^2) + epsilon) * scale over the axes from `axis` on, in float32 as the operator's stash_type says."""
    x, scale = node.inputs[0], node.inputs[1]
    assert x is not None, "the operator needs an input"
    assert scale is not None, "the operator needs a scale"
    assert x.shape is not None, "a traced value has a shape"
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    wide = x if x.dtype == ir.DataType.FLOAT else into.op("Cast", x, to=ir.DataType.FLOAT)
    axes = into.ints(*range(axis % len(x.shape), len(x.shape)))
    mean = into.op("ReduceMean", into.op("Mul", wide, wide), axes, keepdims=1)
    root = into.op("Sqrt", into.op("Add", mean, into.constant(f"f32.epsilon{epsilon}", np.array(epsilon, np.float32))))
    normed = into.op("Div", wide, root)
    return into.op("Mul", normed if scale.dtype == ir.DataType.FLOAT else into.op("Cast", normed, to=scale.dtype), scale)


def _turn(into: Insertion, node: ir.Node) -> ir.Value:
    """x [B,H,T,D], cos and sin [B,T,R/2]: the first R entries turned, in halves or in interleaved pairs; the others as they are."""
    x, cos, sin = node.inputs
    assert x is not None, "the operator needs an input"
    assert cos is not None, "the operator needs cosines"
    assert sin is not None, "the operator needs sines"
    if x.shape is None or len(x.shape) != 4:
        raise ir.passes.PreconditionError(f"{node.name}: turns {x.shape}, and only [B,H,T,D] is known")
    heads, size = int(x.shape[1]), int(x.shape[3])  # type: ignore[arg-type]
    rotary = node.attributes["rotary_embedding_dim"].as_int() if "rotary_embedding_dim" in node.attributes else 0
    rotary = rotary or size
    cos, sin = (into.op("Unsqueeze", value, into.ints(1)) for value in (cos, sin))
    turned, rest = (x, None) if rotary == size else into.ops("Split", 2, x, into.ints(rotary, size - rotary), axis=3)
    if "interleaved" in node.attributes and node.attributes["interleaved"].as_int():
        batch = x.shape[0] if isinstance(x.shape[0], int) else 0
        # Pairs are an axis of their own: [B,H,T*R/2,2], its two columns the members.
        pairs = into.op("Reshape", turned, into.ints(batch, heads, -1, 2))
        a, b = (
            into.op("Reshape", one, into.ints(batch, heads, -1, rotary // 2))
            for one in into.ops("Split", 2, pairs, into.ints(1, 1), axis=3)
        )
        first, second = _rotated(into, a, b, cos, sin)
        columns = (into.op("Reshape", one, into.ints(batch, heads, -1, 1)) for one in (first, second))
        out = into.op("Reshape", into.op("Concat", *columns, axis=3), into.ints(batch, heads, -1, rotary))
    else:
        a, b = into.ops("Split", 2, turned, into.ints(rotary // 2, rotary // 2), axis=3)
        out = into.op("Concat", *_rotated(into, a, b, cos, sin), axis=3)
    return out if rest is None else into.op("Concat", out, rest, axis=3)


def _rotated(into: Insertion, a: ir.Value, b: ir.Value, cos: ir.Value, sin: ir.Value) -> tuple[ir.Value, ir.Value]:
    first = into.op("Sub", into.op("Mul", a, cos), into.op("Mul", b, sin))
    return first, into.op("Add", into.op("Mul", b, cos), into.op("Mul", a, sin))
