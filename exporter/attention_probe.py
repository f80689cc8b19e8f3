"""What a stream's attention does: its largest score and the share that falls on the sinks, out of the very graph that decodes.

A copy of the bundle's decode graph, with each layer's scores and weights as outputs beside the logits, runs a few tokens on a copy of the
stream's state. The stream itself is not touched.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from sinkring.exporter.edited_session import open_edited
from sinkring.runtime.backends import proving_target
from sinkring.runtime.bfloat16 import element_type, host_dtype
from sinkring.runtime.embedding import EmbeddingTable
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Manifest


@dataclass(frozen=True)
class AttentionSeen:
    """Of N tokens in L layers of H query heads, at a position where the sinks are there.

    largest_score: the largest number that meets a softmax (scale included). typical_score: the largest of each token, layer and head,
    averaged. sink_share: the part of the attention that falls on the sinks, averaged; sink_share_by_layer: float64 [L].
    """

    largest_score: float
    typical_score: float
    sink_share: float
    sink_share_by_layer: NDArray[np.float64]


class AttentionProbe:
    """Opened once: it holds a session and one row's states, and a look allocates nothing that stays.

    Raises UnsupportedError for a bundle of several rows or rings, and for one whose decode graph has no softmax per layer.
    """

    def __init__(self, bundle: Path, manifest: Manifest, threads: int | None = None) -> None:
        if manifest.batch != 1 or len(manifest.rings) != 1:
            raise UnsupportedError(
                f"{bundle}: has {manifest.batch} rows and {len(manifest.rings)} rings; attention is looked at in a bundle of one and one"
            )
        self._geometry = manifest.rings[0].geometry
        form = manifest.graph("decode", proving_target(manifest))
        graph = bundle / form.cpu_path
        if form.update != "in_place":
            raise UnsupportedError(f"{graph}: gives out new rows in place of its caches; attention is looked at in graphs that update them")
        model = onnx.load(graph, load_external_data=False)
        groups, capacity = manifest.model.kv_heads, self._geometry.capacity
        shape = (1, groups, manifest.model.query_heads // groups, 1, capacity)
        softmaxes = [node for node in model.graph.node if node.op_type == "Softmax"]
        if len(softmaxes) != manifest.model.layers:
            raise UnsupportedError(f"{graph}: has {len(softmaxes)} Softmax nodes for {manifest.model.layers} layers; it can't be read")
        # One block each for all layers, whose parts are what the graph writes to.
        self._scores = np.zeros((len(softmaxes), *shape), np.float32)
        self._weights = np.zeros_like(self._scores)
        wanted = {}
        for layer, node in enumerate(softmaxes):
            wanted[node.input[0]], wanted[node.output[0]] = self._scores[layer], self._weights[layer]
        model.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in wanted)
        self._session = open_edited(model, bundle, threads=threads)
        self._embedding = None if manifest.embedding is None else EmbeddingTable(bundle, manifest.embedding)
        self._fed = np.zeros((1, 1, *manifest.input_row), manifest.input_dtype)
        self._position, self._slot = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._states = {state.name: np.zeros(state.shape, host_dtype(state.dtype)) for state in manifest.states}
        self._logits = np.zeros((1, 1, manifest.model.vocab_size), np.float32)
        self._binding = self._session.io_binding()
        inputs = {manifest.input_name: self._fed, "position": self._position, manifest.rings[0].write_index: self._slot}
        outputs = {"logits": self._logits, **wanted}
        # A state is written in place: it is bound as input and as output.
        for state in manifest.states:
            array, kind = self._states[state.name], element_type(state.dtype)
            self._binding.bind_input(state.name, "cpu", 0, kind, array.shape, array.ctypes.data)
            self._binding.bind_output(state.updated, "cpu", 0, kind, array.shape, array.ctypes.data)
        for name, array in inputs.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def look(self, state: dict[str, NDArray[Any]], position: int, tokens: NDArray[np.int64]) -> AttentionSeen:
        """What the next tokens, int64 [N] with N >= 1, see that come at `position`; state, copied: tensors of `Stream.capture`."""
        for name, array in self._states.items():
            array[...] = state[name]
        largest, shares = [], []
        for offset, token in enumerate(tokens):
            self._fed[0, 0] = token if self._embedding is None else self._embedding.of_tokens(tokens[offset : offset + 1])[0]
            self._position[0] = position + offset
            self._slot[0] = self._geometry.slot(position + offset)
            self._session.run_with_iobinding(self._binding)
            largest.append(self._scores.max(axis=-1))
            shares.append(self._weights[..., : self._geometry.sinks_tokens].sum(axis=-1, dtype=np.float64))
        by_layer = np.stack(shares).reshape(len(tokens), len(self._scores), -1).mean(axis=(0, 2))
        highest = np.stack(largest)
        return AttentionSeen(float(highest.max()), float(highest.mean(dtype=np.float64)), float(by_layer.mean()), by_layer)
