"""Runners to compare, as a user names them: which runtime, which settings, which form of the decode graph."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from sinkring.exporter.edited_session import open_edited, run_session
from sinkring.exporter.engine_builder import compile_engine
from sinkring.exporter.engine_runner import EngineRunner
from sinkring.exporter.new_rows import after_step, cache_outputs
from sinkring.runtime.backends.engine import MODULES, find_engine
from sinkring.runtime.bfloat16 import to_host
from sinkring.runtime.embedding import EmbeddingTable
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest

NO_OPTIMIZER = "no-optimizer"
_ONNXRUNTIME = "onnxruntime"


@dataclass(frozen=True)
class RunnerSpec:
    """One runner of one bundle. name: as the user wrote it; graph: path of its decode graph; optimized: by ONNX Runtime."""

    name: str
    bundle: Path
    backend: str
    graph: str
    optimized: bool = True

    @property
    def is_engine(self) -> bool:
        return self.backend in MODULES

    def model(self) -> onnx.ModelProto:
        """The decode graph, its weights where they lie."""
        return onnx.load(self.bundle / self.graph, load_external_data=False)

    def open(self, manifest: Manifest, threads: int | None, marked: onnx.ModelProto | None = None) -> BaseRunner:
        """A Polygraphy runner. marked: run this graph in place of the bundle's; an engine is then compiled for it, on the GPU it is for."""
        if not self.is_engine:
            return _SessionRunner(
                lambda: open_edited(marked or self.model(), self.bundle, threads=threads, optimized=self.optimized), name=self.name
            )

        def load(trt: Any, device: Any) -> bytes | memoryview:
            if marked is None:
                engine = find_engine(manifest, "decode", self.backend, device.sm, trt.__version__, device.name)
                return (self.bundle / engine.path).read_bytes()
            graph = marked.SerializeToString()
            return compile_engine(trt, self.backend, self.bundle / self.graph, device.sm, {}, graph=graph).engine

        return EngineRunner(self.name, self.backend, load)


def parse_runner(text: str, bundle: Path, manifest: Manifest) -> RunnerSpec:
    """ "onnxruntime", "onnxruntime:no-optimizer", "onnxruntime:fused" (a form of the graph), or both of these; "tensorrt-rtx", "tensorrt".

    Raises InputError for what is none of these, UnsupportedError for a target that the bundle has no graph for.
    """
    backend, *options = text.strip().split(":")
    if backend not in (_ONNXRUNTIME, *MODULES):
        raise InputError(f"runner {text!r}: {backend!r} is not known; known: {', '.join((_ONNXRUNTIME, *sorted(MODULES)))}")
    forms = {path.split(".")[1]: path for path in sorted({graph.path for graph in manifest.graphs if graph.role == "decode"})}
    known = () if backend in MODULES else (NO_OPTIMIZER, *forms)
    if odd := [option for option in options if option not in known]:
        takes = f"it takes: {', '.join(known)}" if known else "it takes none"
        raise InputError(f"runner {text!r}: {odd[0]!r} is no option of {backend}; {takes}")
    named = [option for option in options if option in forms]
    if len(named) > 1:
        raise InputError(f"runner {text!r}: names the forms {' and '.join(named)}; it runs one, write two runners with a comma between")
    graph = forms[named[0]] if named else manifest.graph("decode", backend).path
    if backend == _ONNXRUNTIME:
        graph = {each.path: each.cpu_path for each in manifest.graphs}[graph]
    return RunnerSpec(text.strip(), bundle, backend, graph, NO_OPTIMIZER not in options)


def infer(runner: BaseRunner, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All outputs by name. bfloat16 is uint16, its bits, which Polygraphy's check of inputs does not know."""
    outputs: dict[str, NDArray[Any]] = runner.infer(dict(feeds), check_inputs=False)
    return outputs


class _SessionRunner(OnnxrtRunner):
    """Polygraphy's, but that bfloat16 goes in and comes out as its bits."""

    def infer_impl(self, feed_dict: dict[str, NDArray[Any]]) -> OrderedDict[str, NDArray[Any]]:
        began = time.perf_counter()
        names = [node.name for node in self.sess.get_outputs()]
        outputs = run_session(self.sess, names, feed_dict)
        self.inference_time = time.perf_counter() - began
        return OrderedDict(zip(names, outputs, strict=True))


class ThreadedRunner:
    """A runner and the states that it threads from step to step: every row of the batch is fed the same tokens.

    states: by input name, as the next step reads them. dtypes are the manifest's.
    """

    def __init__(self, spec: RunnerSpec, runner: BaseRunner, manifest: Manifest) -> None:
        self.spec, self.manifest, self._runner = spec, manifest, runner
        self._table = None if manifest.embedding is None else EmbeddingTable(spec.bundle, manifest.embedding)
        self.reset()

    def reset(self) -> None:
        self.position = 0
        self.states: Mapping[str, NDArray[Any]] = {
            state.name: to_host(np.full(state.shape, state.initial), state.dtype) for state in self.manifest.states
        }

    def feeds(self, token: int) -> dict[str, NDArray[Any]]:
        """What the next step is fed, states included."""
        rows = self.manifest.batch
        indices = {ring.write_index: np.full(rows, ring.geometry.slot(self.position), np.int64) for ring in self.manifest.rings}
        fed = np.array([token]) if self._table is None else self._table.of_tokens(np.array([token]))
        step = np.repeat(fed[None], rows, axis=0)
        return {self.manifest.input_name: step, "position": np.full(rows, self.position, np.int64), **indices, **self.states}

    def step(self, token: int) -> NDArray[np.float32]:
        """Logits [B,V] after the token."""
        feeds = self.feeds(token)
        outputs = infer(self._runner, feeds)
        update = next(graph.update for graph in self.manifest.graphs if self.spec.graph in (graph.path, graph.widened))
        # What came before is kept by whoever looks at a step.
        self.states = after_step(feeds, self.manifest, update, [outputs[name] for name in cache_outputs(self.manifest, update)])
        self.position += 1
        logits: NDArray[np.float32] = outputs["logits"][:, -1]
        return logits
