"""What a bundle holds: geometry, state, bytes, operators, engines. Reads files only: needs onnx, neither torch nor a backend."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx
from sinkring.exporter.engine_summary import EngineSummary
from sinkring.runtime.bundle import check_consistent, check_files
from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import DTYPE_BYTES, MANIFEST_NAME, Graph, Manifest, Ring, StateTensor


@dataclass(frozen=True)
class RingSummary:
    """One geometry and its tensors: S, W, M, C and slack in tokens, allocated bytes, and (S + M) * 2 * L * G * D * bytes * B.

    kind: that of its states. capacity is C, the slots; most_tokens how many tokens a linear cache holds, None for a ring.
    """

    write_index: str
    kind: str
    most_tokens: int | None
    sinks_tokens: int
    window_tokens: int
    slots: int
    capacity: int
    slack_tokens: int
    layers: int
    tensors: int
    shape: tuple[int, ...]
    dtype: str
    allocated_bytes: int
    formula_bytes: int


@dataclass(frozen=True)
class GraphSummary:
    """One graph file, the (role, target) pairs that use it, and how many nodes of each operator it has, subgraphs included."""

    path: str
    uses: tuple[str, ...]
    tokens: int
    opset: int
    nodes: int
    operators: dict[str, int]


@dataclass(frozen=True)
class EngineState:
    """An engine and whether it is stale: built from a graph that is no longer the bundle's."""

    summary: EngineSummary
    stale: bool


@dataclass(frozen=True)
class Inspection:
    """All that `inspect_bundle` found. cache_bytes: of all state, for all rows, constant for ever."""

    bundle: str
    manifest: Manifest
    rings: tuple[RingSummary, ...]
    cache_bytes: int
    graphs: tuple[GraphSummary, ...]
    engines: tuple[EngineState, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists, strings and numbers; the manifest's state registry in full."""
        return dataclasses.asdict(self)


def inspect_bundle(bundle: str | Path) -> Inspection:
    """Read a bundle and hold its parts against one another.

    Raises BundleError: a manifest that contradicts itself or names a path outside the bundle, a file that is missing or not what the
    manifest says, a ring whose bytes are not (S + M) * 2 * L * G * D * bytes * B, a state that is not an input of a decode graph with the
    manifest's shape, a damaged report.
    """
    folder = Path(bundle)
    manifest = Manifest.read(folder)
    check_consistent(folder, manifest)
    check_files(folder, manifest)
    return Inspection(
        bundle=str(bundle),
        manifest=manifest,
        rings=tuple(_ring(manifest, index, ring) for index, ring in enumerate(manifest.rings)),
        cache_bytes=manifest.cache_bytes,
        graphs=tuple(_graphs(folder, manifest)),
        engines=tuple(
            EngineState(EngineSummary.read(folder / engine.report), engine.graph_sha256 != manifest.file(engine.graph_path).sha256)
            for engine in manifest.engines
        ),
    )


def _ring(manifest: Manifest, index: int, ring: Ring) -> RingSummary:
    states = [state for state in manifest.states if state.kind in ("ring", "linear") and state.ring == index]
    if not states:
        raise BundleError(f"{MANIFEST_NAME}: rings[{index}] ({ring.write_index}) has no state tensors; export again")
    geometry, model = ring.geometry, manifest.model
    shape, dtype = states[0].shape, states[0].dtype
    allocated = sum(prod(state.shape) * DTYPE_BYTES[state.dtype] for state in states)
    rows = manifest.batch * 2 * len(ring.layers) * model.kv_heads
    formula = rows * geometry.capacity * model.head_size * DTYPE_BYTES[dtype]
    if allocated != formula:
        raise BundleError(
            f"{MANIFEST_NAME}: rings[{index}] has {allocated} bytes in {len(states)} tensors ({states[0].name} {shape} {dtype} first), "
            f"(S={geometry.sinks_tokens} + M={geometry.slots}) * 2 * L={len(ring.layers)} * G={model.kv_heads} * D={model.head_size} * "
            f"{DTYPE_BYTES[dtype]} bytes * B={manifest.batch} is {formula}; the bundle is damaged, export again"
        )
    return RingSummary(
        write_index=ring.write_index,
        kind=states[0].kind,
        most_tokens=geometry.most_tokens,
        sinks_tokens=geometry.sinks_tokens,
        window_tokens=geometry.window_tokens,
        slots=geometry.slots,
        capacity=geometry.capacity,
        slack_tokens=geometry.slack,
        layers=len(ring.layers),
        tensors=len(states),
        shape=shape,
        dtype=dtype,
        allocated_bytes=allocated,
        formula_bytes=formula,
    )


def _graphs(folder: Path, manifest: Manifest) -> Iterator[GraphSummary]:
    """One summary a file: targets that take the same form share it."""
    uses: dict[str, list[Graph]] = {}
    for graph in manifest.graphs:
        for path in dict.fromkeys((graph.path, graph.cpu_path)):
            uses.setdefault(path, []).append(graph)
    for path, graphs in uses.items():
        try:
            model = onnx.load(folder / path, load_external_data=False)
        except Exception as error:  # protobuf's errors share no base
            raise BundleError(f"{path}: is not an ONNX file ({error}); export again") from None
        if any(graph.role == "decode" for graph in graphs):
            _check_states(path, model.graph, manifest.states)
        operators = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in _nodes(model))
        yield GraphSummary(
            path=path,
            uses=tuple(f"{graph.role} {graph.target}" for graph in graphs),
            tokens=graphs[0].tokens,
            opset=next((entry.version for entry in model.opset_import if not entry.domain), 0),
            nodes=operators.total(),
            operators=dict(operators.most_common()),
        )


def _check_states(path: str, graph: onnx.GraphProto, states: Iterable[StateTensor]) -> None:
    shapes = {tensor.name: tuple(dim.dim_value for dim in tensor.type.tensor_type.shape.dim) for tensor in graph.input}
    for state in states:
        if shapes.get(state.name) != state.shape:
            found = shapes.get(state.name, "no such input")
            raise BundleError(f"{path}: {state.name}: the graph has {found}, {MANIFEST_NAME} says {state.shape}; export again")


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    waiting: list[Iterable[onnx.NodeProto]] = [model.graph.node, *(function.node for function in model.functions)]
    while waiting:
        for node in waiting.pop():
            yield node
            for attribute in node.attribute:
                waiting += [graph.node for graph in (attribute.g, *attribute.graphs) if graph.node]
