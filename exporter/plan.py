"""What an engine's plan does with the caches, and whether that keeps sinkring's promises.

The promises: every step writes only the new rows of a cache, in place, and a decode step reads the cache where it lies, in one fused
attention kernel or in kernels that make no copy of it. A builder breaks them without a word (a scale of 1.0, a `Where` write, a `Concat`),
so the plan is read after each build.
Words: a *rewrite* writes a whole cache anew; an *operand* copy is a cache-sized temporary made from a cache for a matrix product. A chunk
of several tokens always pays for operand copies on TensorRT-RTX 1.7; they cost time, once a chunk, and break no promise.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

from sinkring.exporter.plan_kernels import Kernel, PlanTensor, read_kernels, read_scratch_bytes, read_weight_bytes
from sinkring.runtime.errors import BuildError
from sinkring.runtime.manifest import DTYPE_BYTES, StateTensor, Update, rows_name


@dataclass(frozen=True)
class CacheUpdate:
    """How one cache gets its new rows. `kernel` writes it last; None when no kernel writes it.

    in_place: nothing but the new rows is written. Of a graph that gives them out, `kernel` writes the rows.
    """

    cache: str
    in_place: bool
    kernel: str | None


@dataclass(frozen=True)
class CacheCopy:
    """A kernel that writes a tensor at least as large as the cache it was made from."""

    cache: str
    kind: Literal["rewrite", "operand"]
    kernel: str
    tensor: str
    shape: tuple[int, ...]
    copy_bytes: int
    cache_bytes: int
    cache_elements: int


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer. `kernels` counts from the first kernel that writes a cache of this layer up to the next layer's.

    attention: the kernels that multiply with this layer's caches; `fused` when it is a single one from query to result.
    """

    layer: int
    updates: tuple[CacheUpdate, ...]
    attention: tuple[str, ...]
    fused: bool
    copies: tuple[CacheCopy, ...]
    kernels: int


@dataclass(frozen=True)
class PlanReport:
    """The plan of one engine. scratch and weight bytes are None when the builder did not say."""

    tokens: int
    kernels: int
    scratch_bytes: int | None
    weight_bytes: int | None
    layers: tuple[LayerPlan, ...]

    def faults(self) -> tuple[str, ...]:
        """Broken promises, each naming layer, kernel and sizes. Empty for a good plan."""
        found = []
        for plan in self.layers:
            where = f"layer {plan.layer}"
            broken = [copy for copy in plan.copies if copy.kind == "rewrite" or self.tokens == 1]
            rewritten = {copy.cache for copy in broken if copy.kind == "rewrite"}
            found += [
                f"{where}: {update.cache} is not updated in place ({_writer(update.kernel)})"
                for update in plan.updates
                if not update.in_place and update.cache not in rewritten
            ]
            found += [f"{where}: {_describe(copy)}" for copy in broken]
            if not plan.attention:
                found.append(f"{where}: no kernel multiplies with its caches, so its attention is missing from the plan")
            elif self.tokens == 1 and not plan.fused and plan.copies:
                found.append(f"{where}: attention is not one fused kernel but {', '.join(plan.attention)}")
        return tuple(found)

    def lacks_fused_kernel(self) -> bool:
        """Whether a decode plan is faulty only because the builder took the attention apart: all caches are written in place."""
        in_place = all(update.in_place for plan in self.layers for update in plan.updates)
        apart = any(plan.attention and not plan.fused and plan.copies for plan in self.layers)
        return self.tokens == 1 and apart and in_place and all(copy.kind == "operand" for plan in self.layers for copy in plan.copies)

    def warnings(self) -> tuple[str, ...]:
        """What costs time in a chunk of several tokens and could be avoided by another graph or another capacity."""
        if self.tokens == 1:
            return ()
        found = []
        for plan in self.layers:
            operands = [copy for copy in plan.copies if copy.kind == "operand"]
            for copy in operands:
                # A copy in a wider float type may have twice the bytes of a cache and no more elements.
                if prod(copy.shape) >= 2 * copy.cache_elements:
                    found.append(
                        f"layer {plan.layer}: {_describe(copy)}; expanded to the query heads, fold the heads of a group into the tokens"
                    )
            times = Counter(copy.cache for copy in operands)
            found += [
                f"layer {plan.layer}: {cache} is copied {count} times a chunk; a capacity that is a multiple of 8 slots avoids padding"
                for cache, count in times.items()
                if count > 1
            ]
        return tuple(found)


def read_plan(log_text: str, states: tuple[StateTensor, ...], tokens: int, update: Update = "in_place") -> PlanReport:
    """Read a builder's log (or an inspector's one-line report) against the caches of a bundle. update: of the graph.

    states: the manifest's, of kind "ring" and "linear" (others are passed over), each with its layer and its shape as this graph binds it;
    tokens: largest T of the graph, 1 for decode.
    Raises BuildError when the text lists no kernels.
    """
    kernels = read_kernels(log_text)
    if not kernels:
        raise BuildError(
            "the builder listed no kernels, so its plan cannot be checked: build with detailed profiling verbosity and a verbose logger"
        )
    if update == "rows":
        states = tuple(dataclasses.replace(state, updated=rows_name(state.name)) for state in states)
    caches = [state for state in states if state.kind in ("ring", "linear") and state.layer is not None]
    updated = {state.updated for state in states}
    starts = _layer_starts(kernels, caches)
    order = sorted(starts, key=lambda layer: starts[layer])
    ends = {layer: starts[following] for layer, following in pairwise(order)}
    layers = []
    for layer in sorted({state.layer for state in caches if state.layer is not None}):
        mine = [state for state in caches if state.layer == layer]
        copies: list[CacheCopy] = []
        readers: list[Kernel] = []
        for state in mine:
            found, reading = _follow(kernels, state, updated - {state.updated})
            copies += found
            readers += [kernel for kernel in reading if kernel not in readers]
        fused = [kernel for kernel in readers if kernel.fused_attention]
        large = fused or readers
        layers.append(
            LayerPlan(
                layer=layer,
                updates=tuple(_update(kernels, state, update) for state in mine),
                attention=tuple(kernel.name for kernel in large),
                fused=len(fused) == 1,
                copies=tuple(copies),
                kernels=ends.get(layer, len(kernels)) - starts[layer] if layer in starts else 0,
            )
        )
    return PlanReport(tokens, len(kernels), read_scratch_bytes(log_text), read_weight_bytes(log_text), tuple(layers))


def _update(kernels: tuple[Kernel, ...], state: StateTensor, update: Update) -> CacheUpdate:
    """In place: exactly one kernel writes the updated cache, and it has that same tensor as an input, so it writes into what is there.

    Of rows: at least one kernel writes them, and none the cache.
    """
    writers = [kernel for kernel in kernels if _has(kernel.outputs, state.updated)]
    if update == "rows":
        in_place = bool(writers) and not any(_has(kernel.outputs, state.name) for kernel in kernels)
    else:
        in_place = len(writers) == 1 and _has(writers[0].inputs, state.updated)
    return CacheUpdate(state.name, in_place, writers[-1].name if writers else None)


def _follow(kernels: tuple[Kernel, ...], state: StateTensor, others: set[str]) -> tuple[list[CacheCopy], list[Kernel]]:
    """Follow a cache through the plan: the cache-sized copies made of it, and the kernels that multiply with it or with a copy.

    Only tensors as large as the cache are followed, so a slice of the sinks or a mask ends the trail. A kernel that has the cache both as
    input and as output is its in-place update: what else it writes (rotated queries, a mask, the `others`) is no copy of the cache.
    """
    elements, cache_bytes = prod(state.shape), prod(state.shape) * DTYPE_BYTES[state.dtype]
    trail = {state.name, state.updated}
    copies: list[CacheCopy] = []
    readers: list[Kernel] = []
    for kernel in kernels:
        read = {tensor.name for tensor in kernel.inputs} & trail
        if not read:
            continue
        if kernel.multiplies:
            readers.append(kernel)
            continue
        if kernel.sums_products:
            readers.append(kernel)
        written = {tensor.name for tensor in kernel.outputs}
        if read <= written:
            continue
        for tensor in kernel.outputs:
            size = tensor.elements
            if size is None or size < elements or tensor.name in others:
                continue
            trail.add(tensor.name)
            kind: Literal["rewrite", "operand"] = "rewrite" if tensor.name == state.updated else "operand"
            copies.append(CacheCopy(state.name, kind, kernel.name, tensor.name, tensor.shape, tensor.bytes or 0, cache_bytes, elements))
    return copies, readers


def _layer_starts(kernels: tuple[Kernel, ...], caches: list[StateTensor]) -> dict[int, int]:
    """Index of the first kernel that writes a cache of each layer."""
    owner = {state.updated: state.layer for state in caches}
    starts: dict[int, int] = {}
    for index, kernel in enumerate(kernels):
        for tensor in kernel.outputs:
            layer = owner.get(tensor.name)
            if layer is not None:
                starts.setdefault(layer, index)
    return starts


def _has(tensors: tuple[PlanTensor, ...], name: str) -> bool:
    return any(tensor.name == name for tensor in tensors)


def _writer(kernel: str | None) -> str:
    return f"kernel {kernel} writes it" if kernel else "no kernel writes it; is it an input and an output of the graph?"


def _describe(copy: CacheCopy) -> str:
    shape = ",".join(str(size) for size in copy.shape)
    verb = "rewrites the whole of" if copy.kind == "rewrite" else "makes a copy of"
    sizes = f"{copy.copy_bytes} bytes; the cache has {copy.cache_bytes} bytes"
    return f"kernel {copy.kernel} {verb} {copy.cache} ({copy.tensor} [{shape}], {sizes})"
