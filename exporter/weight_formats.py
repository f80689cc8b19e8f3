"""In which form each weight of a model is stored: as it is, or in 4 or 8 bits.

For ONNX Runtime (form "blocks") layers take the bits of the format; the embedding and the head take 8 in either, since they are what a
small model loses most by. Blocks of a GGUF file are taken over as they are wherever the operators can say the same thing; all other weights
are rounded. In the form "rows" layers have 8 bits and one scale for each output, and embedding and head are those of "blocks". For engines
(form "qdq") all matrices, the embedding and the head too, take the bits of the format, and all are rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import numpy as np
import torch
from sinkring.exporter.quantize import BLOCK, BlockMatrix, quantize_blocks
from sinkring.exporter.quantize_symmetric import BLOCKS, VALUE_DTYPES, SymmetricMatrix, largest_block, quantize_symmetric
from sinkring.models.gguf_blocks import GgufBlocks, read_gguf_blocks
from sinkring.models.modelopt import PackedMatrix
from sinkring.models.source import LoadedModel, resolve_source
from sinkring.runtime.errors import InputError, UnsupportedError
from sinkring.runtime.manifest import WeightForm, WeightStorage

WeightFormat = Literal["fp32", "int8", "int8-rows", "int4", "fp8"]
# What each form has.
FORMATS: dict[WeightForm, tuple[str, ...]] = {"blocks": ("int8", "int4"), "rows": ("int8-rows",), "qdq": ("int8", "int4", "fp8")}
QDQ_BLOCK = 32
_LAYER_BITS = {"int8": 8, "int4": 4}
_TABLE_BITS = 8


@dataclass(frozen=True)
class StoredWeights:
    """blocks: by parameter name, those of layers all of one form. taken_over: names whose blocks are the source file's. kept: names of the
    matrices left as they are.
    """

    blocks: Mapping[str, BlockMatrix | SymmetricMatrix]
    taken_over: tuple[str, ...]
    kept: tuple[str, ...]
    form: WeightForm = "blocks"

    def described(self, weights: WeightFormat) -> WeightStorage:
        return WeightStorage(weights, self.kept, self.taken_over, self.form)

    def by_initializer(self, model: torch.nn.Module) -> dict[str, Any]:
        """The blocks by the names that a trace of `model` gives its weights; a tied one goes by any of its names."""
        named = list(model.named_parameters(remove_duplicate=False))
        owners = {id(parameter): self.blocks[name] for name, parameter in named if name in self.blocks}
        return {f"model.{name}": owners[id(parameter)] for name, parameter in named if id(parameter) in owners}


def check_weight_format(weights: str, keep: Sequence[str], block: int | None = None) -> None:
    """Raises UnsupportedError for a format that is not known, InputError for patterns or a block that no format heeds."""
    if weights not in get_args(WeightFormat):
        raise UnsupportedError(f"weights={weights!r} is not a format; use one of {', '.join(get_args(WeightFormat))}")
    if isinstance(keep, str) or not all(isinstance(pattern, str) and pattern for pattern in keep):
        raise InputError(f"keep_fp32={keep!r}: give a list of patterns of weight names, such as 'model.layers.0.*'")
    if keep and weights == "fp32":
        raise InputError(f"keep_fp32={keep[0]!r} with weights fp32, which keeps all: leave it out, or use weights int8 or int4")
    if block is not None and (weights != "int4" or block not in BLOCKS):
        raise InputError(
            f"block={block!r} with weights {weights}: give one of {', '.join(map(str, BLOCKS))}, with weights int4 for an engine"
        )


def choose_weights(
    loaded: LoadedModel,
    weights: str,
    keep: Sequence[str],
    form: WeightForm = "blocks",
    block: int | None = None,
    beside: torch.nn.Module | None = None,
    either_sign: bool = False,
) -> StoredWeights:
    """The blocks of every matrix that is not kept. Patterns are those of fnmatch, against names such as model.layers.0.mlp.up_proj.weight.

    form: what the targets read. block: of form "qdq" and int4, the most weights that share a scale. beside: an embedding that the host
    looks up, and no graph. either_sign: scales of form "qdq" and int4 may be negative.
    Raises InputError for a pattern that no matrix matches.
    """
    if weights == "fp32":
        return StoredWeights({}, (), ())
    if form == "qdq":
        return _choose_symmetric(loaded, weights, keep, block or QDQ_BLOCK, beside, either_sign)
    ours = _gguf_blocks(loaded)
    blocks: dict[str, BlockMatrix | SymmetricMatrix] = {}
    taken: list[str] = []
    kept: list[str] = []
    for name, weight, is_table, matched in _to_choose(loaded.model, keep, beside):
        in_rows = form == "rows" and not is_table
        if matched or (weight.shape[1] % BLOCK and not in_rows):
            kept.append(name)
            continue
        if in_rows:
            blocks[name] = quantize_symmetric(weight, "int8", weight.shape[1])
            continue
        bits = _TABLE_BITS if is_table else _LAYER_BITS[weights]
        same = take_over(ours[name], weight, bits, residuals=not is_table) if name in ours else None
        blocks[name] = same or quantize_blocks(weight, bits)
        if same:
            taken.append(name)
    return StoredWeights(blocks, tuple(taken), tuple(kept), form)


def _choose_symmetric(
    loaded: LoadedModel, weights: Any, keep: Sequence[str], wanted: int, beside: torch.nn.Module | None, either_sign: bool
) -> StoredWeights:
    matrices: dict[str, SymmetricMatrix] = {}
    kept: list[str] = []
    theirs = loaded.packed
    if other := next((name for name, packed in theirs.items() if packed.kind != weights), None):
        raise UnsupportedError(
            f"weights={weights!r}: the source stores {other} in {theirs[other].kind}: use weights {theirs[other].kind}, or fp32 for all "
            "in floats"
        )
    for name, weight, _, matched in _to_choose(loaded.model, keep, beside):
        block = largest_block(weight.shape[1], wanted) if weights == "int4" else weight.shape[1]
        if matched or block is None or (theirs and name not in theirs):
            # What ModelOpt left alone stays so.
            kept.append(name)
        elif theirs:
            matrices[name] = _as_it_is(theirs[name])
        else:
            matrices[name] = quantize_symmetric(weight, weights, block, either_sign=either_sign)
    return StoredWeights(matrices, tuple(name for name in matrices if name in theirs), tuple(kept), "qdq")


def _as_it_is(packed: PackedMatrix) -> SymmetricMatrix:
    values = packed.values.view(torch.uint8).numpy().view(VALUE_DTYPES["fp8"]) if packed.kind == "fp8" else packed.values.numpy()
    return SymmetricMatrix(packed.kind, packed.block, values.astype(VALUE_DTYPES[packed.kind]), packed.scales.numpy())


def _to_choose(model: Any, keep: Sequence[str], beside: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
    """`_matrices`, each with whether a pattern of `keep` matches its name. Raises InputError, first, for a pattern that none matches."""
    matrices = list(_matrices(model, beside))
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name, _, _ in matrices):
            raise InputError(f"keep_fp32={pattern!r}: no weight has such a name; names look like {next(iter(matrices))[0]}")
    for name, weight, is_table in matrices:
        yield name, weight, is_table, any(fnmatchcase(name, pattern) for pattern in keep)


def take_over(blocks: GgufBlocks, weight: torch.Tensor, bits: int, *, residuals: bool) -> BlockMatrix | None:
    """The file's own blocks, or None where they cannot be: other bits, residuals that are not wanted, or not this weight's numbers.

    Q4_0 and Q8_0 have a whole zero point. Q4_1's minimum m is no multiple of its scale d: the zero point is the nearest whole number to
    -m/d, and what is left over, m + d * zero_point, is the block's residual.
    """
    # Also for rows in an order that nobody told us of.
    if blocks.bits != bits or not np.array_equal(blocks.dequantized(), weight.numpy()):
        return None
    if blocks.kind != "Q4_1":
        zero = np.full(blocks.scales.shape, 1 << (bits - 1), np.uint8)
        return BlockMatrix(bits, blocks.values, blocks.scales, zero)
    if not residuals:
        return None
    scales = blocks.scales
    with np.errstate(divide="ignore", invalid="ignore"):
        nearest = np.where(scales == 0, 0, np.round(-blocks.minima / scales))
    zero = np.clip(nearest, 0, (1 << bits) - 1).astype(np.uint8)
    return BlockMatrix(bits, blocks.values, scales, zero, blocks.minima + scales * zero)


def _gguf_blocks(loaded: LoadedModel) -> dict[str, GgufBlocks]:
    source = resolve_source(loaded.source)
    names = [name for name, _, _ in _matrices(loaded.model, None)]
    return read_gguf_blocks(source.path, loaded.config, names) if source.kind == "gguf" else {}


def _matrices(model: Any, beside: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, weight [N,K], whether it is the embedding or the head) of each matrix that a layer multiplies with or looks up, each once."""
    tables = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if hasattr(module, "weight")}
    heads = {id(parameter) for parameter in (model.get_output_embeddings() or torch.nn.Module()).parameters()}
    seen = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) and id(module) not in tables:
            continue
        weight = module.weight
        if module is beside and id(weight) not in heads:
            continue
        if id(weight) not in seen:
            seen.add(id(weight))
            yield f"{name}.weight", weight.detach(), id(module) in tables
