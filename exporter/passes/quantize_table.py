"""Gather of rows of a table that is stored in blocks -> GatherBlockQuantized, on the very bytes of a tied head's MatMulNBits."""

from collections.abc import Mapping

import onnx_ir as ir
from sinkring.exporter.passes.insertion import Insertion, replace_value
from sinkring.exporter.passes.quantize_projections import CONTRIB
from sinkring.exporter.quantize import BLOCK, BlockMatrix


class QuantizeTable(ir.passes.InPlacePass):
    """matrices: by the name of the initializer that holds the float table; those of tables have no residuals."""

    def __init__(self, matrices: Mapping[str, BlockMatrix]) -> None:
        super().__init__()
        self.matrices = matrices

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            matrix = self._matrix(node)
            if matrix is None:
                continue
            table, output = node.inputs[0], node.outputs[0]
            assert table is not None, "it has a name"
            assert matrix.residuals is None, f"{table.name}: the operator knows no residuals"
            into = Insertion(graph, node)
            rows = into.op_of(
                CONTRIB,
                "GatherBlockQuantized",
                # Of the same bytes as a head's values, which have one axis more.
                into.constant(f"{table.name}.table", matrix.packed_values().reshape(matrix.shape[0], -1)),
                node.inputs[1],
                into.constant(f"{table.name}.scales", matrix.scales),
                into.constant(f"{table.name}.zero_points", matrix.packed_zero_points()),
                bits=matrix.bits,
                block_size=BLOCK,
                gather_axis=0,
                quantize_axis=1,
            )
            rows.shape, rows.type = output.shape, output.type
            into.commit()
            replace_value(output, rows)
            graph.remove(node, safe=True)
            if not table.uses():
                del graph.initializers[str(table.name)]
            modified = True
        if modified:
            model.opset_imports[CONTRIB] = 1
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        left = [node for node in model.graph if self._matrix(node) is not None]
        if left:
            raise ir.passes.PostconditionError(f"{len(left)} look-ups in quantized tables are left")

    def _matrix(self, node: ir.Node) -> BlockMatrix | None:
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is None or not table.is_initializer() or node.attributes.get_int("axis", 0) != 0:
            return None
        return self.matrices.get(str(table.name))
