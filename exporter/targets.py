"""Targets as data: which form of each graph a runtime is given. Everything that differs between runtimes is decided here."""

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir
from sinkring.exporter.passes.lower_appended import LowerToAppendedAttention
from sinkring.exporter.passes.lower_fused import LowerToFusedAttention
from sinkring.exporter.passes.lower_grouped import LowerToGroupedAttention
from sinkring.exporter.passes.lower_half import LowerToHalfAttention
from sinkring.exporter.passes.lower_heads import LowerToHeadAttention
from sinkring.exporter.passes.lowering import LowerRingAttention
from sinkring.exporter.passes.older_operators import OlderOperators
from sinkring.exporter.passes.split_heads import SplitHeadsTogether
from sinkring.exporter.tensorrt_operators import TENSORRT_10_OPERATORS
from sinkring.exporter.weight_formats import FORMATS
from sinkring.runtime.backends.engine import TURING_TARGET
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import PORTABLE_TARGET, Role, Update, WeightForm


@dataclass(frozen=True)
class Target:
    """What one runtime gets. `attention` maps a graph's role to the pass that lowers RingAttention for it.

    weight_forms: how weights of 4 or 8 bits may be stored for it (see WeightStorage); none if it runs none. update: how its graphs' caches
    get new rows. passes: what is made of the graph after that; operators: those that its parser takes, None for all of the opset.
    by_default: whether a bundle has its graphs without being asked. negative_scales: whether it takes weights whose scales are below zero.
    only_float16: it needs float16 weights and caches.
    """

    name: str
    opset: int
    ir_version: int
    attention: dict[Role, type[LowerRingAttention]]
    weight_forms: tuple[WeightForm, ...] = ()
    update: Update = "in_place"
    passes: tuple[type[ir.passes.InPlacePass], ...] = ()
    operators: frozenset[str] | None = None
    by_default: bool = True
    negative_scales: bool = False
    only_float16: bool = False

    def form_of(self, weights: str) -> WeightForm | None:
        """The form in which it reads weights of this format; None if it does not."""
        return next((form for form in self.weight_forms if weights in FORMATS[form]), None)


# In TensorRT a prefill chunk is products of matrices either way, and the grouped form is the one that it does not repeat K and V for; at
# T = 1 it reads the ring in place only in the fused form. ONNX Runtime has no fused kernel for either on a CPU, and the form by heads is
# the fastest of its own in both (docs/measurements.md).
TARGETS = {
    target.name: target
    for target in (
        Target(
            "onnxruntime",
            24,
            10,
            {"decode": LowerToHeadAttention, "prefill": LowerToHeadAttention},
            weight_forms=("blocks", "rows"),
            passes=(SplitHeadsTogether,),
        ),
        Target(
            "tensorrt-rtx",
            24,
            10,
            {"decode": LowerToFusedAttention, "prefill": LowerToGroupedAttention},
            weight_forms=("qdq",),
            negative_scales=True,
        ),
        # The same files: TensorRT from 10.15 on takes these operators, too. Its parser: "Scale coefficients must all be positive".
        Target("tensorrt", 24, 10, {"decode": LowerToFusedAttention, "prefill": LowerToGroupedAttention}, weight_forms=("qdq",)),
        # JetPack 6: no operator that updates an input, and none of an opset beyond 20.
        Target(
            PORTABLE_TARGET,
            20,
            9,
            {"decode": LowerToAppendedAttention, "prefill": LowerToAppendedAttention},
            update="rows",
            passes=(OlderOperators,),
            operators=TENSORRT_10_OPERATORS,
            by_default=False,
        ),
        # For Turing TensorRT-RTX has no product of float32, which attention's are in all other graphs.
        Target(
            TURING_TARGET, 24, 10, {"decode": LowerToHalfAttention, "prefill": LowerToHalfAttention}, by_default=False, only_float16=True
        ),
    )
}


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise UnsupportedError(f"target {name!r} is not known; known: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]


def check_dtypes(chosen: Iterable[Target], dtype: str, cache_dtype: str) -> None:
    """dtype: as `export` names it; cache_dtype: as the manifest does. Raises UnsupportedError for a target that has no graphs in these."""
    for target in chosen:
        # Not proven in it.
        if target.update == "rows" and (dtype == "bf16" or cache_dtype == "bfloat16"):
            name = "dtype" if dtype == "bf16" else "cache_dtype"
            raise UnsupportedError(f"{name}='bf16' with target {target.name}: use fp16, or another target")
        if target.only_float16 and (dtype, cache_dtype) != ("fp16", "float16"):
            raise UnsupportedError(
                f"target {target.name}: its products are float16 in all of the graph; export with dtype fp16 and no cache_dtype"
            )
