"""manifest.json: the contract between exporter and runtime.

Written and read from the dataclasses below and from nothing else; the README specifies the format for other readers. A reader refuses a
`format_version` it does not know and a field it does not know, so that nothing with a meaning is passed over.
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sinkring.runtime.errors import BundleError, GeometryError
from sinkring.runtime.ring import RingGeometry

FORMAT = "sinkring-bundle"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights.bin"
CONTRACT_KEY = "sinkring.contract"

Policy = Literal["native", "streaming"]
Role = Literal["decode", "prefill"]
WeightForm = Literal["blocks", "rows", "qdq"]
# How a graph's caches get the new rows of a call. in_place: the graph writes them, its output `updated` is the input `name`. rows: it only
# reads the caches and gives out the rows, which the runtime writes into their slots once the call is over.
Update = Literal["in_place", "rows"]

# What is lowered for it has operators that every runtime knows: they all run it where a bundle has no graphs of their own.
PORTABLE_TARGET = "tensorrt-10.3"
RUNTIMES = ("onnxruntime", "tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class ModelInfo:
    """What was exported. `source` is what the user named (a folder, a .gguf file, a known name): `validate` loads the oracle from it."""

    architecture: str
    source: str
    source_sha256: str
    layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    trained_context_tokens: int
    weight_bytes: int


@dataclass(frozen=True)
class Ring:
    """One geometry, of a ring or a linear cache. `write_index` names the graph input int64 [B]: where the first new row goes."""

    write_index: str
    geometry: RingGeometry
    layers: tuple[int, ...]


@dataclass(frozen=True)
class StateTensor:
    """One tensor that lives from step to step: graph input `name`, its updated self is the graph output `updated`.

    shape is that of the whole batch; `batch_axis` is the axis of the stream rows; `initial` fills it at allocation and at reset;
    `ring` indexes Manifest.rings for the kinds "ring" and "linear" (a ring that never wraps) and is None otherwise.
    """

    name: str
    updated: str
    kind: Literal["ring", "linear", "counter"]
    shape: tuple[int, ...]
    dtype: str
    batch_axis: int
    initial: float
    ring: int | None = None
    layer: int | None = None


@dataclass(frozen=True)
class File:
    """A file of the bundle, by its path relative to the bundle, with what it must contain."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Graph:
    """One ONNX graph. `target` says what it was lowered for ("onnxruntime", "tensorrt-rtx"); `tokens` is its largest T.

    widened: of a graph that computes in bfloat16, the file that a CPU runs in its place: the same nodes, each with its inputs cast to
    float32 and its results rounded back to bfloat16. None where `path` itself runs on a CPU.
    update: see Update; with "rows" each state has an output of its new rows (see rows_name) in place of its updated self.
    """

    role: Role
    target: str
    path: str
    tokens: int
    widened: str | None = None
    update: Update = "in_place"

    @property
    def cpu_path(self) -> str:
        """What ONNX Runtime runs on a CPU."""
        return self.widened or self.path


@dataclass(frozen=True)
class Engine:
    """An engine built from one graph of this bundle; stale when `graph_sha256` is no longer that graph's hash."""

    role: Role
    target: str
    sm: int
    path: str
    builder_version: str
    graph_path: str
    graph_sha256: str
    report: str


@dataclass(frozen=True)
class Tokenizer:
    """tokenizer: path of a `tokenizers` JSON file; chat_template: path of a Jinja template or None; stop_ids end a turn."""

    tokenizer: str
    chat_template: str | None
    bos_id: int | None
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class WeightStorage:
    """How the matrices are stored. form "blocks", for ONNX Runtime: format "int8" and "int4" are blocks of 32 weights with zero points, of
    the embedding and the head in 8 bits in both. form "rows", for ONNX Runtime: format "int8-rows" is 8 bits with one scale for each output
    and products of integers, the embedding and the head as in "blocks". form "qdq", for engines: DequantizeLinear without zero points in
    front of each product, "int4" with a scale for each block, "int8" and "fp8" (e4m3) with one for each output.

    kept_fp32: names of the matrices that are float32 all the same; taken_over: of those that are the source file's own
    blocks, unchanged.
    """

    format: Literal["fp32", "int8", "int8-rows", "int4", "fp8"] = "fp32"
    kept_fp32: tuple[str, ...] = ()
    taken_over: tuple[str, ...] = ()
    form: WeightForm = "blocks"


@dataclass(frozen=True)
class Codebooks:
    """Rows of an embedding beside those of tokens: `count` codebooks of `size` codes, whose rows in `table` begin at `first`.

    Row first + k * size + c is code c of codebook k. `silence` is the code, and the row, of a codebook that says nothing.
    """

    count: int
    size: int
    first: int
    silence: int


@dataclass(frozen=True)
class Embedding:
    """What the host needs to embed tokens for graphs that take embedded rows.

    table: path of a NumPy file [rows, hidden_size] of `dtype`; row i is what token i is embedded as, a model's own factors included. The
    row of a step is that of its token, plus in a model with codebooks those of its codes.
    """

    table: str
    rows: int
    hidden_size: int
    dtype: str
    codebooks: Codebooks | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything a runtime needs to know about a bundle. Shapes use the alphabet of the README."""

    model: ModelInfo
    policy: Policy
    batch: int
    chunk: int
    dtype: str
    position_limit: int
    rings: tuple[Ring, ...]
    states: tuple[StateTensor, ...]
    graphs: tuple[Graph, ...]
    files: tuple[File, ...]
    made_with: dict[str, str]
    engines: tuple[Engine, ...] = ()
    tokenizer: Tokenizer | None = None
    weights: WeightStorage = WeightStorage()
    embedding: Embedding | None = None
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn, none without a tokenizer."""
        return self.tokenizer.stop_ids if self.tokenizer else ()

    @property
    def input_name(self) -> str:
        """Of the graph input that a step is fed."""
        return "tokens" if self.embedding is None else "embeddings"

    @property
    def input_dtype(self) -> str:
        return "int64" if self.embedding is None else "float32"

    @property
    def input_row(self) -> tuple[int, ...]:
        """Its axes behind [B,T]: none for token ids."""
        return () if self.embedding is None else (self.embedding.hidden_size,)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all state tensors, from their shapes."""
        return sum(_elements(state.shape) * DTYPE_BYTES[state.dtype] for state in self.states)

    @property
    def cache_dtype(self) -> str:
        """What keys and values are stored as, by the first cache; `dtype` is that of weights and arithmetic."""
        return next((state.dtype for state in self.states if state.kind in ("ring", "linear")), self.dtype)

    @property
    def cache_bytes_formula(self) -> int:
        """(S + M) * 2 * G * D * bytes, summed over the layers and rows: what `cache_bytes` must equal when all state is caches."""
        model, item = self.model, DTYPE_BYTES[self.cache_dtype]
        return sum(
            self.batch * ring.geometry.capacity * 2 * len(ring.layers) * model.kv_heads * model.head_size * item for ring in self.rings
        )

    def contract(self, update: Update = "in_place") -> dict[str, Any]:
        """What a graph of that update and its runtime must agree on, as plain JSON values. Every graph of a bundle carries it in its
        metadata, under CONTRACT_KEY: the manifest itself is hashed by nobody, and a wrong number in it would write a wrong slot without
        an error."""
        fields = ["policy", "batch", "chunk", "dtype", "position_limit", "rings", "states"]
        if self.embedding is not None:
            fields.append("embedding")
        whole = dataclasses.asdict(self)
        contract: dict[str, Any] = json.loads(json.dumps({name: whole[name] for name in fields}))
        return contract if update == "in_place" else {**contract, "update": update}

    def graph(self, role: Role, target: str) -> Graph:
        """That of `target`, or for a runtime that has none here the portable one. Raises BundleError."""
        for graph in self.graphs_for(target):
            if graph.role == role:
                return graph
        have = sorted({graph.target for graph in self.graphs})
        raise BundleError(f"the bundle has no {role} graph for target {target!r}, only for {have}; export again with that target")

    def graphs_for(self, target: str) -> tuple[Graph, ...]:
        """Those of `target`, or for a runtime that has none here the portable ones."""
        own = tuple(graph for graph in self.graphs if graph.target == target)
        if own or target not in RUNTIMES:
            return own
        return tuple(graph for graph in self.graphs if graph.target == PORTABLE_TARGET)

    def file(self, path: str) -> File:
        for file in self.files:
            if file.path == path:
                return file
        raise BundleError(f"{MANIFEST_NAME}: {path} is named but not listed under files; export again")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> "Manifest":
        """Parse and check; `where` is named in errors. Raises BundleError."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise BundleError(f"{where}: not valid JSON ({error}); the bundle is damaged, export again") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise BundleError(f"{where}: format is {found!r}, expected {FORMAT!r}; this is not a sinkring bundle")
        if raw.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{where}: format version is {raw.get('format_version')!r}, this sinkring reads {FORMAT_VERSION}; "
                "export again with this sinkring, or install the one that wrote it"
            )
        manifest: Manifest = _build(cls, raw, where)
        return manifest

    @classmethod
    def read(cls, bundle: Path) -> "Manifest":
        """Read BUNDLE/manifest.json. Raises BundleError when there is none."""
        if not bundle.is_dir():
            raise BundleError(f"{bundle}: no such bundle folder; make one with `sinkring export MODEL --out {bundle}`")
        path = bundle / MANIFEST_NAME
        if not path.is_file():
            raise BundleError(f"{bundle}: has no {MANIFEST_NAME}, so it is not a sinkring bundle; make one with `sinkring export`")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{path}: not UTF-8 text ({error}); the bundle is damaged, export again") from None
        return cls.from_json(text, str(path))


DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


def rows_name(state: str) -> str:
    """The output of a graph of update "rows" that holds the new rows of a state, [B,G,T,D] in its dtype."""
    return f"{state}.rows"


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _build(kind: Any, raw: Any, where: str) -> Any:
    """Turn parsed JSON into `kind` (dataclass, tuple, dict, literal, union or plain type), naming the place of what does not fit."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(raw, dict):
            raise BundleError(f"{where}: is {type(raw).__name__}, expected an object; the bundle is damaged, export again")
        hints = typing.get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        if unknown := sorted(set(raw) - set(fields)):
            raise BundleError(f"{where}: unknown field {unknown[0]!r}; written by another sinkring? export again with this one")
        for name, field in fields.items():
            if name not in raw and field.default is dataclasses.MISSING:
                raise BundleError(f"{where}: field {name!r} is missing; the bundle is damaged, export again")
        values = {name: _build(hints[name], value, f"{where}: {name}") for name, value in raw.items()}
        try:
            return kind(**values)  # type: ignore[operator]
        except GeometryError as error:
            raise BundleError(f"{where}: {error}") from None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(raw, list):
        return tuple(_build(args[0], item, f"{where}[{index}]") for index, item in enumerate(raw))
    if origin is dict and isinstance(raw, dict):
        return {key: _build(args[1], value, f"{where}[{key!r}]") for key, value in raw.items()}
    if origin is Literal and raw in args:
        return raw
    if origin is types.UnionType:
        if raw is None and type(None) in args:
            return None
        return _build(next(arg for arg in args if arg is not type(None)), raw, where)
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(kind, type) and isinstance(raw, kind) and not (kind is int and isinstance(raw, bool)):
        return raw
    raise BundleError(f"{where}: is {raw!r}, expected {kind}; the bundle is damaged, export again")
