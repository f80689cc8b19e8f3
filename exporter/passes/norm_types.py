"""RMSNormalization in a graph of several float types: one type for input, scale and result.

The rules that fuse a norm take one whose scale is float32 and whose input is narrower (Gemma, gpt-oss), which ONNX allows and runtimes do
not: the input is widened in front of it, as the nodes that it stands for did.
"""

import onnx_ir as ir


class WidenFusedNorms(ir.passes.InPlacePass):
    """Ensures that every RMSNormalization's input and result have its scale's type."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if node.op_type != "RMSNormalization":
                continue
            x, scale, out = node.inputs[0], node.inputs[1], node.outputs[0]
            assert x is not None, "the operator needs an input"
            assert scale is not None, "the operator needs a scale"
            if scale.dtype is None or x.dtype == scale.dtype == out.dtype:
                continue
            if x.dtype != scale.dtype:
                cast = ir.node("Cast", [x], {"to": scale.dtype})
                cast.outputs[0].shape, cast.outputs[0].type = x.shape, ir.TensorType(scale.dtype)
                model.graph.insert_before(node, cast)
                node.replace_input_with(0, cast.outputs[0])
            if out.dtype != scale.dtype:
                self._round_behind(model.graph, node, scale.dtype)
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    @staticmethod
    def _round_behind(graph: ir.Graph, node: ir.Node, computed: ir.DataType) -> None:
        """The fused nodes had another type at their end: their rounding is put back."""
        out = node.outputs[0]
        assert out.dtype is not None, "a traced value has a type"
        cast = ir.node("Cast", [out], {"to": out.dtype})
        rounded = cast.outputs[0]
        rounded.shape, rounded.type = out.shape, ir.TensorType(out.dtype)
        graph.insert_after(node, cast)
        for user, index in list(out.uses()):
            if user is not cast:
                user.replace_input_with(index, rounded)
        out.type = ir.TensorType(computed)
