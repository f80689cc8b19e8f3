"""What the passes share that put an operator on weights in blocks in the place of one on float weights."""

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir
from sinkring.exporter.quantize import BlockMatrix

CONTRIB = "com.microsoft"


class StoreInBlocks(ir.passes.InPlacePass):
    """matrices: by the name of the initializer that holds the float weight. Ensures that no node reads one of them any more.

    WEIGHT: which input of a node is the weight. WHAT: the nodes, as an error calls them.
    """

    WEIGHT: ClassVar[int]
    WHAT: ClassVar[str]

    def __init__(self, matrices: Mapping[str, BlockMatrix]) -> None:
        super().__init__()
        self.matrices = matrices

    def matrix(self, node: ir.Node) -> BlockMatrix | None:
        """The blocks of the weight that `node` reads, or None if it is another node or its weight stays as it is."""
        raise NotImplementedError

    def replace(self, graph: ir.Graph, node: ir.Node, name: str, matrix: BlockMatrix) -> None:
        """Put nodes that read `matrix` in the place of `node`, whose weight is called `name`."""
        raise NotImplementedError

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            matrix = self.matrix(node)
            if matrix is None:
                continue
            weight = node.inputs[self.WEIGHT]
            assert weight is not None, "it has a name"
            self.replace(graph, node, str(weight.name), matrix)
            if not weight.uses():
                del graph.initializers[str(weight.name)]
            modified = True
        if modified:
            model.opset_imports[CONTRIB] = 1
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        left = [node for node in model.graph if self.matrix(node) is not None]
        if left:
            raise ir.passes.PostconditionError(f"{len(left)} {self.WHAT} are left")
