"""The order of the passes from a traced step graph to the graph of one target."""

from collections.abc import Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules.fusion import _rms_normalization as rms
from sinkring.exporter.passes.dequantize_weights import DequantizeWeights
from sinkring.exporter.passes.integer_products import MultiplyIntegers
from sinkring.exporter.passes.merge_projections import MergeProjections
from sinkring.exporter.passes.norm_types import WidenFusedNorms
from sinkring.exporter.passes.quantize_projections import QuantizeProjections
from sinkring.exporter.passes.quantize_table import QuantizeTable
from sinkring.exporter.passes.tied_head import TiedHeadToGemm
from sinkring.exporter.passes.transpose_weights import SUFFIX, StoreWeightsTransposed
from sinkring.exporter.passes.unit_transposes import UnitTransposesToReshapes
from sinkring.exporter.passes.widen import WidenBfloat16Arithmetic, computes_in_bfloat16
from sinkring.exporter.quantize import BlockMatrix
from sinkring.exporter.quantize_symmetric import SymmetricMatrix
from sinkring.exporter.quick_rules import default_rules_at_their_operators, rules_at_their_operators
from sinkring.exporter.targets import Target
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Role, WeightForm

# Constants up to this many bytes are folded; weights are larger and are never touched.
FOLD_LIMIT_BYTES = 1 << 14


def simplify(model: ir.Model, stored: Mapping[str, BlockMatrix | SymmetricMatrix] | None = None, form: WeightForm = "blocks") -> ir.Model:
    """Clean-up of a traced graph: weights stored as they are read, constants folded, norms as one node.

    stored: the weights of 4 or 8 bits, by the names of their initializers. form: that of those that are not BlockMatrix. With BlockMatrix
    ones, and in the form "rows", the graph is one for ONNX Runtime only.
    """
    stored = stored or {}
    blocks = {name: matrix for name, matrix in stored.items() if isinstance(matrix, BlockMatrix)}
    symmetric = {name: matrix for name, matrix in stored.items() if isinstance(matrix, SymmetricMatrix)}

    def kept_as(weight: str) -> object:
        name = weight.removesuffix(SUFFIX)
        if name in symmetric:
            return symmetric[name].kind, symmetric[name].block
        return blocks[name].bits if name in blocks else None

    ir.passes.Sequential(
        StoreWeightsTransposed(), TiedHeadToGemm(), MergeProjections(kept_as), QuantizeProjections(blocks), QuantizeTable(blocks)
    )(model)
    with default_rules_at_their_operators():
        optimizer.optimize_ir(model, input_size_limit=FOLD_LIMIT_BYTES, output_size_limit=FOLD_LIMIT_BYTES)
    RewritePass(rules_at_their_operators(rms.rms_normalization_rules))(model)
    ir.passes.Sequential(
        # Behind all that folds constants, which these are.
        MultiplyIntegers(symmetric) if form == "rows" else DequantizeWeights(symmetric),
        WidenFusedNorms(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        # The tracer records the source line of every node, with the paths of the machine it ran on.
        common.ClearMetadataAndDocStringPass(),
    )(model)
    for node in model.graph:
        for value in node.outputs:
            value.metadata_props.clear()
    return model


def widen(lowered: ir.Model) -> ir.Model | None:
    """A copy of a lowered graph (weights shared with it) for where there is no bfloat16 arithmetic; None if it has none."""
    if not any(computes_in_bfloat16(node) for node in lowered.graph):
        return None
    widened = lowered.clone()
    WidenBfloat16Arithmetic()(widened)
    return widened


def lower_for(target: Target, role: Role, simplified: ir.Model) -> ir.Model:
    """A copy of `simplified` (weights shared with it) in the form that `target` runs best.

    Raises UnsupportedError, by its name, for an operator that the target's parser does not take.
    """
    model = simplified.clone()
    model.opset_imports[""] = target.opset
    model.ir_version = target.ir_version
    ir.passes.Sequential(
        target.attention[role](),
        *(made() for made in target.passes),
        common.ShapeInferencePass(),
        UnitTransposesToReshapes(),
        common.RemoveUnusedNodesPass(),
        common.NameFixPass(),
        common.TopologicalSortPass(),
    )(model)
    model.producer_name = "sinkring"
    _check_operators(target, model)
    return model


def _check_operators(target: Target, model: ir.Model) -> None:
    for node in model.graph:
        if target.operators is not None and (node.domain or node.op_type not in target.operators):
            raise UnsupportedError(
                f"target {target.name}: its parser has no operator {node.op_type}, which {node.name} of this model needs; export for "
                "another target"
            )
