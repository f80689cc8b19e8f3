"""A minimal valid bundle made by hand: one or more attention layers on ring caches, and the ways of writing a cache that copy it.

Sizes are small but real for the builder: H=4 query heads, G=2 KV heads of D=16, C=32 slots.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sinkring.runtime.manifest import MANIFEST_NAME, File, Graph, Manifest, ModelInfo, Ring, Role, StateTensor
from sinkring.runtime.ring import RingGeometry

HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 4, 2, 16, 32
SINKS, SLOTS, CHUNK = 2, 30, 8
CAPACITY = SINKS + SLOTS
WEIGHTS = "weights.bin"

Write = Literal["scatter", "where", "scatter_nd", "shift"]
Attend = Literal["attention", "folded"]


class _Nodes:
    """Collects nodes, constants and weights under fresh names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, out: str | None = None, **attributes: object) -> str:
        name = out or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"node_{name}", **attributes))
        return name

    def const(self, value: object, dtype: type = np.int64) -> str:
        name = f"const_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.const(self._random.standard_normal(shape) * 0.2, np.float32)


def ring_graph(
    *,
    tokens: int = 1,
    layers: int = 1,
    write: Write = "scatter",
    attend: Attend = "attention",
    scale: float = 0.25,
    kv_heads: int = KV_HEADS,
) -> onnx.ModelProto:
    """tokens int64 [1,T], position int64 [1], write_index int64 [1], caches float32 [1,G,C,D] -> logits and updated caches.

    tokens=1 is a decode graph of fixed shape; more is a prefill graph with the dynamic axes T and N (input `rows` int64 [N]).
    write and scale choose forms that a builder turns into cache copies; attend="folded" puts the heads of a group into the tokens.
    """
    n, group, hidden = _Nodes(), HEADS // kv_heads, HEADS * HEAD_SIZE
    cache_shape = [1, kv_heads, CAPACITY, HEAD_SIZE]
    inputs = [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, 1 if tokens == 1 else "T"]),
        helper.make_tensor_value_info("position", TensorProto.INT64, [1]),
        helper.make_tensor_value_info("write_index", TensorProto.INT64, [1]),
    ]
    outputs = []
    slot = n.const(np.arange(CAPACITY).reshape(1, 1, 1, CAPACITY))
    if tokens == 1:
        mask = n.add("LessOrEqual", slot, "position")
    else:
        length = n.add("Squeeze", n.add("Shape", "tokens", start=1, end=2))
        steps = n.add("Reshape", n.add("Range", n.const(0), length, n.const(1)), n.const([1, 1, -1, 1]))
        seen = n.add("LessOrEqual", slot, n.add("Add", steps, "position"))
        mask = n.add("Where", seen, n.const(0, np.float32), n.const(-1e9, np.float32))
    x = n.add("Gather", n.weight(VOCAB, hidden), "tokens")
    for layer in range(layers):

        def project(heads: int, x: str = x) -> str:
            rows = n.add("Reshape", n.add("MatMul", x, n.weight(hidden, heads * HEAD_SIZE)), n.const([1, -1, heads, HEAD_SIZE]))
            return n.add("Transpose", rows, perm=[0, 2, 1, 3])

        query = project(HEADS)
        caches = []
        for kind in ("k", "v"):
            name = f"cache.{layer}.{kind}"
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, cache_shape))
            outputs.append(helper.make_tensor_value_info(f"{name}.updated", TensorProto.FLOAT, cache_shape))
            caches.append(_WRITES[write](n, name, project(kv_heads)))
        if attend == "folded":
            query = n.add("Reshape", query, n.const([1, kv_heads, -1, HEAD_SIZE]))
            folded = n.add("Concat", *[mask] * group, axis=2)
            seen_by = n.add("Attention", query, *caches, folded, scale=scale)
            seen_by = n.add("Reshape", seen_by, n.const([1, HEADS, -1, HEAD_SIZE]))
        else:
            seen_by = n.add("Attention", query, *caches, mask, scale=scale)
        merged = n.add("Reshape", n.add("Transpose", seen_by, perm=[0, 2, 1, 3]), n.const([1, -1, hidden]))
        x = n.add("Add", x, n.add("MatMul", merged, n.weight(hidden, hidden)))
    if tokens > 1:
        inputs.append(helper.make_tensor_value_info("rows", TensorProto.INT64, ["N"]))
        x = n.add("Gather", x, "rows", axis=1)
    n.add("MatMul", x, n.weight(hidden, VOCAB), out="logits")
    outputs.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 1 if tokens == 1 else "N", VOCAB]))
    graph = helper.make_graph(n.nodes, "ring", inputs, outputs, n.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def _scatter(n: _Nodes, cache: str, rows: str) -> str:
    return n.add("TensorScatter", cache, rows, "write_index", out=f"{cache}.updated", axis=-2, mode="linear")


def _where(n: _Nodes, cache: str, rows: str) -> str:
    hot = n.add("Equal", n.const(np.arange(CAPACITY).reshape(1, 1, CAPACITY, 1)), "write_index")
    return n.add("Where", hot, rows, cache, out=f"{cache}.updated")


def _scatter_nd(n: _Nodes, cache: str, rows: str) -> str:
    slots_first = n.add("Transpose", cache, perm=[2, 0, 1, 3])
    new = n.add("Transpose", rows, perm=[2, 0, 1, 3])
    written = n.add("ScatterND", slots_first, n.add("Reshape", "write_index", n.const([1, 1])), new)
    return n.add("Transpose", written, perm=[1, 2, 0, 3], out=f"{cache}.updated")


def _shift(n: _Nodes, cache: str, rows: str) -> str:
    kept = n.add("Slice", cache, n.const([1]), n.const([CAPACITY]), n.const([2]))
    return n.add("Concat", kept, rows, axis=2, out=f"{cache}.updated")


_WRITES: dict[str, Callable[[_Nodes, str, str], str]] = {"scatter": _scatter, "where": _where, "scatter_nd": _scatter_nd, "shift": _shift}


def ring_states(layers: int = 1, kv_heads: int = KV_HEADS) -> tuple[StateTensor, ...]:
    """The caches of `ring_graph` as a manifest lists them."""
    return tuple(
        StateTensor(
            name=f"cache.{layer}.{kind}",
            updated=f"cache.{layer}.{kind}.updated",
            kind="ring",
            shape=(1, kv_heads, CAPACITY, HEAD_SIZE),
            dtype="float32",
            batch_axis=0,
            initial=0.0,
            ring=0,
            layer=layer,
        )
        for layer in range(layers)
        for kind in ("k", "v")
    )


def write_bundle(folder: Path, graphs: dict[Role, onnx.ModelProto], *, layers: int = 1, target: str = "tensorrt-rtx") -> Path:
    """Write `graphs` with one shared weights file and a manifest into `folder`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    blob = bytearray()
    for role, model in graphs.items():
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
                raw = numpy_helper.to_array(tensor).tobytes()
                onnx.external_data_helper.set_external_data(tensor, WEIGHTS, offset=len(blob), length=len(raw))
                tensor.ClearField("raw_data")
                blob += raw
        (folder / f"{role}.onnx").write_bytes(model.SerializeToString())
    (folder / WEIGHTS).write_bytes(bytes(blob))
    paths = [*(f"{role}.onnx" for role in graphs), WEIGHTS]
    manifest = Manifest(
        model=ModelInfo("Hand", "hand", "", layers, HEADS * HEAD_SIZE, HEADS, KV_HEADS, HEAD_SIZE, VOCAB, 0, len(blob)),
        policy="native",
        batch=1,
        chunk=CHUNK,
        dtype="float32",
        position_limit=2**40,
        rings=(Ring("write_index", RingGeometry(SINKS, SLOTS - CHUNK + 1, SLOTS), tuple(range(layers))),),
        states=ring_states(layers),
        graphs=tuple(Graph(role, target, f"{role}.onnx", 1 if role == "decode" else CHUNK) for role in graphs),
        files=tuple(_file(folder, path) for path in paths),
        made_with={},
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return folder


def _file(folder: Path, path: str) -> File:
    content = (folder / path).read_bytes()
    return File(path, len(content), hashlib.sha256(content).hexdigest())
