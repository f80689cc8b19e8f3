"""Gather of rows of a table that is stored in blocks -> GatherBlockQuantized, on the very bytes of a tied head's MatMulNBits."""

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value
from sinkring.exporter.passes.store_in_blocks import CONTRIB, StoreInBlocks
from sinkring.exporter.quantize import BLOCK, BlockMatrix


class QuantizeTable(StoreInBlocks):
    """Blocks of tables have no residuals."""

    WEIGHT = 0
    WHAT = "look-ups in quantized tables"

    def matrix(self, node: ir.Node) -> BlockMatrix | None:
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is None or not table.is_initializer() or node.attributes.get_int("axis", 0) != 0:
            return None
        return self.matrices.get(str(table.name))

    def replace(self, graph: ir.Graph, node: ir.Node, name: str, matrix: BlockMatrix) -> None:
        assert matrix.residuals is None, f"{name}: the operator knows no residuals"
        into, output = Insertion(graph, node), node.outputs[0]
        rows = into.op_of(
            CONTRIB,
            "GatherBlockQuantized",
            # Of the same bytes as a head's values, which have one axis more.
            into.constant(f"{name}.table", matrix.packed_values().reshape(matrix.shape[0], -1)),
            node.inputs[1],
            into.constant(f"{name}.scales", matrix.scales),
            into.constant(f"{name}.zero_points", matrix.packed_zero_points()),
            bits=matrix.bits,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        table = node.inputs[0]
        if table is not None and table.dtype not in (None, ir.DataType.FLOAT):
            rows = into.op("Cast", rows, to=table.dtype)
        rows.shape, rows.type = output.shape, output.type
        into.commit()
        replace_value(output, rows)
        graph.remove(node, safe=True)
