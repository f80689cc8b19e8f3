"""ONNX Runtime on the CPU: rings updated in place, all buffers bound once, weights in memory once.

Each ring is bound as graph input and as graph output at the same address, so TensorScatter writes into it and copies nothing. The prefill
session is bound to one row's slice of the same memory. With one row it decodes as well, with T = 1: its kernels' packed weights are the
only copy in memory then. Of graphs that give out new rows in its place, see host_rows.
"""

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sinkring.runtime.backends.denormals import DenormalsAsZero
from sinkring.runtime.backends.host_rows import HostRows
from sinkring.runtime.backends.huge_pages import mapped, use_huge_pages
from sinkring.runtime.bfloat16 import element_type, to_host
from sinkring.runtime.contract import Tensors, check_contract, check_tensors, expected_tensors
from sinkring.runtime.errors import BundleError, DependencyError, InputError
from sinkring.runtime.manifest import CONTRACT_KEY, Graph, Manifest, StateTensor

try:
    import onnxruntime as ort
except ImportError:
    raise DependencyError("the backend onnxruntime needs the package onnxruntime: pip install 'sinkring[cpu]'") from None

_ERRORS_ONLY = 3
# ONNX Runtime starts as many as it is told, until the system gives it no more and the process dies without a word.
_MOST_THREADS = max(256, os.cpu_count() or 1)
DEVICE = "cpu"
OWN_TARGET = "onnxruntime"
_NUMPY_NAMES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
}


class OnnxRuntimeBackend:
    """See Backend. device: "cpu". threads: intra-op threads, default all cores. one_session: whether the prefill graph decodes, too; it can
    in a bundle of one row, and by default does there where the graphs are ONNX Runtime's own. False runs the decode graph by itself.

    Raises InputError for an option that is unknown or out of range, BundleError for a graph that cannot be loaded or
    is not as the manifest says.
    """

    name = "onnxruntime"
    most_top_k = 0

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        target: str,
        *,
        device: str = "cpu",
        threads: int | None = None,
        one_session: bool | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InputError(
                f"option {sorted(unknown)[0]!r} is not known to the backend onnxruntime; it takes: device, threads, one_session"
            )
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS):
            raise InputError(f"threads={threads!r}: must be a whole number, 1 to {_MOST_THREADS}")
        self._manifest, self.device = manifest, device
        before = mapped()
        if one_session not in (None, True, False) or (one_session and manifest.batch > 1):
            raise InputError(f"one_session={one_session!r}: must be True or False, and False for a bundle of {manifest.batch} rows")
        shared = decodes_with_prefill(manifest, target) if one_session is None else one_session
        decode, prefill = manifest.graph("decode", target), manifest.graph("prefill", target)
        in_blocks = manifest.weights.format != "fp32" and manifest.weights.form != "qdq"
        # Packed, products of several rows are four times as fast, and each session has a copy of its own. Of weights in blocks that is
        # small, and their kernels are many times slower without.
        self._prefill = _session(bundle, manifest, prefill, threads, packed=shared or in_blocks)
        several = manifest.batch > 1
        self._decode = self._prefill if shared else _session(bundle, manifest, decode, threads, packed=several or in_blocks)
        self._decode_last = np.zeros(1, np.int64) if shared else None
        batch, vocab = manifest.batch, manifest.model.vocab_size
        self.input = np.zeros((batch, 1, *manifest.input_row), manifest.input_dtype)
        self.position = np.zeros(batch, np.int64)
        self.write_index = tuple(np.zeros(batch, np.int64) for _ in manifest.rings)
        self.logits = np.zeros((batch, 1, vocab), np.float32)
        self._states = {state.name: np.full(state.shape, to_host(state.initial, state.dtype)) for state in manifest.states}
        # Of graphs that only read the rings; one bundle may have one form for decode and another for prefill.
        self._decode_rows = HostRows(manifest, self._states, batch, 1) if (prefill if shared else decode).update == "rows" else None
        self._prefill_rows = HostRows(manifest, self._states, 1, manifest.chunk) if prefill.update == "rows" else None
        self._chunk_input = np.zeros((manifest.chunk, *manifest.input_row), manifest.input_dtype)
        self._chunk_rows = np.zeros(manifest.chunk, np.int64)
        self._chunk_position = np.zeros(1, np.int64)
        self._chunk_write_index = tuple(np.zeros(1, np.int64) for _ in manifest.rings)
        self._chunk_logits = np.zeros((manifest.chunk, vocab), np.float32)
        self._denormals = DenormalsAsZero()
        self._decode_binding = self._bind_decode()
        self._prefill_bindings = [self._bind_prefill(row) for row in range(batch)]
        use_huge_pages(since=before)

    def decode(self, idle: Sequence[int] = ()) -> None:
        if self._decode_rows is not None:
            self._run(self._decode, self._decode_binding)
            self._decode_rows.write_step(self.write_index, idle)
            return
        if not idle:
            self._run(self._decode, self._decode_binding)
            return
        # The graph steps every row: an idle one writes the one slot of its write index, so only that has to be put back.
        rows = np.array(idle, np.int64)
        kept = []
        for state in self._manifest.states:
            assert state.kind in ("ring", "linear"), f"{state.name}: idle rows of kind {state.kind} are not kept yet"
            assert state.ring is not None, f"{state.name}: has no ring"
            where = (rows, slice(None), self.write_index[state.ring][rows])
            kept.append((self._states[state.name], where, self._states[state.name][where]))
        try:
            self._run(self._decode, self._decode_binding)
        finally:
            for array, where, before in kept:
                array[where] = before

    def extend(self, inputs: dict[str, np.ndarray], idle: Sequence[int] = ()) -> np.ndarray:
        raise NotImplementedError("most_top_k is 0: the tokens are picked on the host")

    def prefill(self, row: int, fed: np.ndarray, position: int, write_index: tuple[int, ...], wanted: int) -> np.ndarray:
        count = len(fed)
        self._chunk_input[:count] = fed
        self._chunk_rows[:wanted] = np.arange(count - wanted, count)
        self._chunk_position[0] = position
        for buffer, index in zip(self._chunk_write_index, write_index, strict=True):
            buffer[0] = index
        binding = self._prefill_bindings[row]
        _bind_input(binding, self._manifest.input_name, self._chunk_input, (1, count, *self._manifest.input_row))
        _bind_input(binding, "rows", self._chunk_rows, (wanted,))
        _bind_output(binding, "logits", self._chunk_logits, (1, wanted, self._chunk_logits.shape[1]))
        if self._prefill_rows is None:
            self._run(self._prefill, binding)
            return self._chunk_logits[:wanted]
        for name, array in self._prefill_rows.of_chunk(count).items():
            _bind_output(binding, name, array)
        self._run(self._prefill, binding)
        self._prefill_rows.write_chunk(row, count, write_index)
        return self._chunk_logits[:wanted]

    def read_row(self, row: int) -> dict[str, np.ndarray]:
        return {state.name: self._row(state, row).copy() for state in self._manifest.states}

    def write_row(self, row: int, state: dict[str, np.ndarray]) -> None:
        for entry in self._manifest.states:
            self._row(entry, row)[...] = state[entry.name]

    def reset_row(self, row: int) -> None:
        for state in self._manifest.states:
            self._row(state, row)[...] = to_host(state.initial, state.dtype)

    def addresses(self) -> dict[str, int]:
        return {name: array.ctypes.data for name, array in self._states.items()}

    def close(self) -> None:
        del self._decode_binding, self._prefill_bindings, self._decode, self._prefill
        self._states.clear()
        give_back_freed_memory()

    def _run(self, session: Any, binding: Any) -> None:
        with self._denormals:
            session.run_with_iobinding(binding)

    def _row(self, state: StateTensor, row: int) -> np.ndarray:
        """View of one row of a state tensor, the batch axis kept with length 1."""
        index = tuple(slice(row, row + 1) if axis == state.batch_axis else slice(None) for axis in range(len(state.shape)))
        return self._states[state.name][index]

    def _bind_decode(self) -> Any:
        binding = self._decode.io_binding()
        _bind_input(binding, self._manifest.input_name, self.input)
        _bind_input(binding, "position", self.position)
        if self._decode_last is not None:
            _bind_input(binding, "rows", self._decode_last)
        for ring, index in zip(self._manifest.rings, self.write_index, strict=True):
            _bind_input(binding, ring.write_index, index)
        _bind_output(binding, "logits", self.logits)
        for state in self._manifest.states:
            _bind_state(binding, state, self._states[state.name], self._decode_rows is None)
        for name, array in self._decode_rows.of_chunk(1).items() if self._decode_rows is not None else ():
            _bind_output(binding, name, array)
        return binding

    def _bind_prefill(self, row: int) -> Any:
        binding = self._prefill.io_binding()
        _bind_input(binding, "position", self._chunk_position)
        for ring, index in zip(self._manifest.rings, self._chunk_write_index, strict=True):
            _bind_input(binding, ring.write_index, index)
        for state in self._manifest.states:
            view = self._row(state, row)
            # A row is bound by its address, so its bytes must lie in one piece.
            assert view.flags.c_contiguous, f"{state.name}: the batch axis must be the first"
            _bind_state(binding, state, view, self._prefill_rows is None)
        return binding


def decodes_with_prefill(manifest: Manifest, target: str) -> bool:
    """Whether the prefill graph of `target` is by default the one that ONNX Runtime on a CPU decodes with."""
    return manifest.batch == 1 and target == OWN_TARGET


def _session(bundle: Path, manifest: Manifest, graph: Graph, threads: int | None, packed: bool) -> Any:
    """packed: the weights of products are copied as their kernels read them; else they are read where the file is mapped."""
    options = ort.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if graph.role == "prefill":
        # A pattern is kept for each shape that was ever seen, and T varies.
        options.enable_mem_pattern = False
    return open_session(bundle, manifest, graph, graph.cpu_path, options, ["CPUExecutionProvider"])


def give_back_freed_memory() -> None:
    """What is free goes back to the system. glibc keeps it for later, and for each thread by itself: of three bundles of int4 weights that
    three threads opened and closed, 600 MB. Of other libraries nothing is known, and nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def adds_bytes_in_32_bits() -> bool:
    """Whether the processor is known to have VNNI: without it, a product of unsigned and signed bytes adds two of them in 16 bits, which
    overflow. ONNX Runtime has another product for those, slower and exact, and has to be told to use it.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def set_common_options(options: Any) -> None:
    """What every session of a bundle's graphs needs, whatever it is for."""
    options.log_severity_level = _ERRORS_ONLY
    # It rearranges convolutions, of which there are none, and of 1.32 dies with a signal on some float16 graphs.
    options.add_session_config_entry("optimization.disable_specified_optimizers", "NchwcTransformer")
    if not adds_bytes_in_32_bits():
        options.add_session_config_entry("session.x64quantprecision", "1")
    # DequantizeLinear of a weight is then computed once, when the session opens. By default it becomes a product that rounds its inputs.
    options.add_session_config_entry("session.disable_quant_qdq", "1")


def open_session(bundle: Path, manifest: Manifest, graph: Graph, path: str, options: Any, providers: list[Any]) -> Any:
    """An InferenceSession of the file of a graph that is what the manifest says. Raises BundleError."""
    set_common_options(options)
    # Of the threads that the session starts, and with the first session of a process also of the one that opens it.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    where = str(bundle / path)
    try:
        with DenormalsAsZero():
            session = ort.InferenceSession(where, options, providers=providers)
    except Exception as error:  # onnxruntime raises classes of its own for each status code
        raise BundleError(
            f"{where}: onnxruntime {ort.__version__} cannot load it ({' '.join(str(error).split())}); export again"
        ) from error
    inputs, outputs = expected_tensors(manifest, graph.role, graph.update)
    check_tensors(where, "graph", "input", _tensors(session.get_inputs()), inputs)
    check_tensors(where, "graph", "output", _tensors(session.get_outputs()), outputs)
    check_contract(where, json.loads(session.get_modelmeta().custom_metadata_map.get(CONTRACT_KEY, "{}")), manifest, graph.update)
    return session


def _tensors(nodes: Any) -> Tensors:
    """As `expected_tensors` gives them: a size that is no number varies."""
    return {
        node.name: (_NUMPY_NAMES.get(node.type, node.type), tuple(size if isinstance(size, int) else None for size in node.shape))
        for node in nodes
    }


def _bind_state(binding: Any, state: StateTensor, array: np.ndarray, in_place: bool) -> None:
    """As input and as output at its one address, which makes the write in place; as input alone for a graph that only reads it."""
    kind = element_type(state.dtype)
    binding.bind_input(state.name, DEVICE, 0, kind, array.shape, array.ctypes.data)
    if in_place:
        binding.bind_output(state.updated, DEVICE, 0, kind, array.shape, array.ctypes.data)


def _bind_input(binding: Any, name: str, array: np.ndarray, shape: tuple[int, ...] | None = None) -> None:
    binding.bind_input(name, DEVICE, 0, array.dtype, shape or array.shape, array.ctypes.data)


def _bind_output(binding: Any, name: str, array: np.ndarray, shape: tuple[int, ...] | None = None) -> None:
    binding.bind_output(name, DEVICE, 0, array.dtype, shape or array.shape, array.ctypes.data)
