"""What the passes share that put integers without zero points in the place of a float weight."""

from collections.abc import Mapping

import onnx_ir as ir
from sinkring.exporter.passes.transpose_weights import SUFFIX
from sinkring.exporter.quantize_symmetric import SymmetricMatrix, stack_symmetric


class StoreSymmetric(ir.passes.InPlacePass):
    """matrices: by the name of the initializer that holds the float weight; MergeProjections, which runs before, joins names by `+`.

    Must run after all constant folding. Ensures that no initializer is one of them any more.
    """

    def __init__(self, matrices: Mapping[str, SymmetricMatrix]) -> None:
        super().__init__()
        self.matrices = matrices

    def replace(self, graph: ir.Graph, weight: ir.Value, matrix: SymmetricMatrix, name: str, transposed: bool) -> None:
        """Let all that reads `weight`, [N,K] or `transposed` [K,N], read `matrix`. name: what to call its parts by."""
        raise NotImplementedError

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for name, weight in list(graph.initializers.items()):
            matrix = self._matrix(name)
            if matrix is None or not weight.uses():
                continue
            self.replace(graph, weight, matrix, name.replace(SUFFIX, ""), name.endswith(SUFFIX))
            del graph.initializers[name]
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def ensures(self, model: ir.Model) -> None:
        left = [name for name in model.graph.initializers if self._matrix(name) is not None]
        if left:
            raise ir.passes.PostconditionError(f"{len(left)} weights that are to be quantized are left, first {left[0]}")

    def _matrix(self, initializer: str) -> SymmetricMatrix | None:
        names = [name.removesuffix(SUFFIX) for name in initializer.split("+")]
        found = [self.matrices[name] for name in names if name in self.matrices]
        return stack_symmetric(found) if len(found) == len(names) else None
