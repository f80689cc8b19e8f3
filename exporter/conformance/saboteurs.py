"""Ways of breaking a runtime or a graph on purpose, so that anyone can see each check fail. All are faults that such projects have shipped.

A saboteur either changes a copy of the bundle, or replaces a piece of the runtime for as long as it is at work.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sinkring.exporter.geometries import leading_geometry
from sinkring.runtime import snapshot
from sinkring.runtime.backends import proving_target
from sinkring.runtime.backends.host_rows import HostRows
from sinkring.runtime.backends.onnxruntime import OnnxRuntimeBackend
from sinkring.runtime.decoder import Decoder
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.ring import RingGeometry
from sinkring.runtime.stream import Stream
from sinkring.runtime.token_ids import check_ids


@dataclass(frozen=True)
class Saboteur:
    """invariants: those whose check must notice it. needs: of the bundle or suite, or it has nothing to break; see `unfit`."""

    name: str
    invariants: tuple[str, ...]
    breaks: str
    patch: Callable[[], AbstractContextManager[None]] | None = None
    edit: Callable[[Path, Manifest], None] | None = None
    needs: tuple[str, ...] = ()

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self.patch is None else self.patch()

    def unfit(self, bundle: Path, manifest: Manifest, full: bool) -> str | None:
        """Why it can do nothing here, or None."""
        geometries = [ring.geometry for ring in manifest.rings]
        wrapping = [geometry for geometry in geometries if geometry.wraps]
        have = {
            "sinks": any(geometry.sinks_tokens for geometry in geometries),
            "rows": manifest.batch > 1,
            "wraps": bool(wrapping),
            "chunks": manifest.chunk > 1,
            "window": any(geometry.window_tokens > 1 for geometry in wrapping),
            "slack": all(geometry.slack > 0 for geometry in geometries if geometry.wraps),
            "angles": "angles" in self.needs and _has_angles(bundle, manifest),
            "rows form": manifest.graph("decode", proving_target(manifest)).update == "rows",
            "full": full,
            "quantized": manifest.weights.format != "fp32",
        }
        missing = [need for need in self.needs if not have[need]]
        return f"--sabotage {self.name} needs {_NEEDS[missing[0]]}" if missing else None


_NEEDS = {
    "sinks": "a bundle with sinks",
    "rows": "a bundle of two rows or more",
    "wraps": "a bundle whose cache wraps",
    "chunks": "a bundle with chunks of two tokens or more",
    "window": "a bundle with a window of two tokens or more",
    "slack": "a bundle with slack",
    "angles": "a bundle with rotary angles: ALiBi takes distances from the slots",
    "rows form": "a bundle whose graphs give out new rows (sinkring export --target tensorrt-10.3)",
    "full": "--suite full",
    "quantized": "a bundle with weights of 4 or 8 bits for engines",
}


def _has_angles(bundle: Path, manifest: Manifest) -> bool:
    """Whether the decode graph looks angles up by position."""
    import onnx

    graph = onnx.load(bundle / _decode_path(manifest), load_external_data=False).graph
    return any(tensor.name.endswith(".digit0") for tensor in graph.initializer)


def find_saboteur(name: str) -> Saboteur:
    for saboteur in SABOTEURS:
        if saboteur.name == name:
            return saboteur
    raise InputError(f"--sabotage {name!r} is not known; known: {', '.join(saboteur.name for saboteur in SABOTEURS)}")


@contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _clamped_write() -> Iterator[None]:
    from sinkring.runtime import decoder

    prefill = OnnxRuntimeBackend.prefill

    def unsplit(position: int, tokens: int, chunk: int, _geometries: Any) -> Iterator[int]:
        for start in range(0, tokens, chunk):
            yield min(chunk, tokens - start)

    def clamped(self: Any, row: int, tokens: Any, position: int, write_index: Sequence[int], wanted: int) -> Any:
        ends = [ring.geometry.capacity - len(tokens) for ring in self._manifest.rings]
        return prefill(self, row, tokens, position, tuple(map(min, write_index, ends)), wanted)

    with _replaced(decoder, "split_chunks", unsplit), _replaced(OnnxRuntimeBackend, "prefill", clamped):
        yield


def _positions_become(change: Callable[[Decoder, int], int]) -> AbstractContextManager[None]:
    """The runtime tells the graphs `change(position)`; where it writes stays right."""

    @contextmanager
    def patch() -> Iterator[None]:
        place, run = Decoder._place, Decoder.run
        prefill = OnnxRuntimeBackend.prefill
        told: list[Decoder] = []

        def wrong_place(self: Decoder, row: int, token: int, position: int) -> None:
            place(self, row, token, position)
            self.backend.position[row] = change(self, position)

        def remember(self: Decoder, *arguments: Any) -> Any:
            told[:] = [self]
            return run(self, *arguments)

        def wrong_prefill(self: Any, row: int, tokens: Any, position: int, *rest: Any) -> Any:
            return prefill(self, row, tokens, change(told[0], position), *rest)

        with (
            _replaced(Decoder, "_place", wrong_place),
            _replaced(Decoder, "run", remember),
            _replaced(OnnxRuntimeBackend, "prefill", wrong_prefill),
        ):
            yield

    return patch()


def _slots_as_positions() -> AbstractContextManager[None]:
    return _positions_become(lambda decoder, position: leading_geometry(decoder.manifest).slot(position))


def _float32_positions() -> AbstractContextManager[None]:
    return _positions_become(lambda _, position: int(np.float32(position)))


@contextmanager
def _row_crosstalk() -> Iterator[None]:
    decode = OnnxRuntimeBackend.decode

    def crossed(self: Any, idle: Sequence[int] = ()) -> None:
        decode(self, idle)
        for state in self._manifest.states:
            slot = int(self.write_index[state.ring][0])
            self._states[state.name][1, :, slot] = self._states[state.name][0, :, slot]

    with _replaced(OnnxRuntimeBackend, "decode", crossed):
        yield


def _row_beside() -> AbstractContextManager[None]:
    write = HostRows.write_step

    def beside(self: Any, write_index: Sequence[Any], idle: Sequence[int]) -> None:
        ends = [array.shape[2] for _, array in self._cached]
        write(self, [(slots + 1) % min(ends) for slots in write_index], idle)

    return _replaced(HostRows, "write_step", beside)


def _row_early() -> AbstractContextManager[None]:
    def early(self: Any, idle: Sequence[int] = ()) -> None:
        self._decode_rows.write_step(self.write_index, idle)
        self._decode.run_with_iobinding(self._decode_binding)

    return _replaced(OnnxRuntimeBackend, "decode", early)


@contextmanager
def _counter_survives() -> Iterator[None]:
    stream, release = Decoder.stream, Decoder.release
    left: dict[tuple[int, int], int] = {}

    def remember(self: Decoder, row: int) -> None:
        left[id(self), row] = self._streams[row].position
        release(self, row)

    def go_on(self: Decoder) -> Stream:
        fresh = stream(self)
        fresh._fed = left.pop((id(self), fresh.row), 0)
        return fresh

    with _replaced(Decoder, "release", remember), _replaced(Decoder, "stream", go_on):
        yield


def _reset_counter_only() -> AbstractContextManager[None]:
    return _replaced(OnnxRuntimeBackend, "reset_row", lambda self, row: None)


def _snapshot_aliases() -> AbstractContextManager[None]:
    return _replaced(
        OnnxRuntimeBackend, "read_row", lambda self, row: {state.name: self._row(state, row) for state in self._manifest.states}
    )


@contextmanager
def _snapshot_loses_head() -> Iterator[None]:
    capture = Stream.capture

    def headless(self: Stream) -> Any:
        record, tensors = capture(self)
        slot = leading_geometry(self._decoder.manifest).slot
        return {**record, "fed": slot(record["fed"])}, tensors

    with _replaced(Stream, "capture", headless):
        yield


def _snapshot_unchecked() -> AbstractContextManager[None]:
    return _replaced(snapshot, "_sha256_of", lambda data, said: said)


def _torn_write() -> AbstractContextManager[None]:
    @contextmanager
    def in_place(path: Path) -> Iterator[Any]:
        with path.open("wb") as file:
            time.sleep(0.02)  # as long as a large snapshot takes to write
            yield file

    return _replaced(snapshot, "_put_in_place", in_place)


@contextmanager
def _rollback_off_by_one() -> Iterator[None]:
    rollback = Stream.rollback
    with _replaced(Stream, "rollback", lambda self, tokens: rollback(self, tokens - 1 if tokens else 0)):
        yield


def _window_believed() -> AbstractContextManager[None]:
    return _replaced(RingGeometry, "slack", property(lambda self: self.slots - self.window_tokens + 1))


@contextmanager
def _growing_buffer() -> Iterator[None]:
    decode, kept = OnnxRuntimeBackend.decode, []

    def keep(self: Any, idle: Sequence[int] = ()) -> None:
        decode(self, idle)
        kept.append(self.logits[0, -1, :32].copy())

    with _replaced(OnnxRuntimeBackend, "decode", keep):
        yield


@contextmanager
def _refusal_swallowed() -> Iterator[None]:
    from sinkring.runtime import stream

    def wrapped(ids: Any, vocab: int, call: str) -> Any:
        array = np.asarray(ids)
        return check_ids(array % vocab if array.dtype == np.int64 else ids, vocab, call)

    with _replaced(stream, "check_ids", wrapped):
        yield


def _decode_path(manifest: Manifest) -> str:
    return manifest.graph("decode", proving_target(manifest)).cpu_path


def _window_short(bundle: Path, manifest: Manifest) -> None:
    for path in {graph.cpu_path for graph in manifest.graphs}:
        _shorten_window(bundle, path)


def _one_form_short(bundle: Path, manifest: Manifest) -> None:
    paths = sorted({graph.cpu_path for graph in manifest.graphs if graph.role == "decode"} - {_decode_path(manifest)})
    _shorten_window(bundle, paths[0] if paths else _decode_path(manifest))


def _shorten_window(bundle: Path, path: str) -> None:
    from sinkring.exporter.conformance.edited_copy import change_constant, edit_graph

    edit_graph(bundle, path, lambda model: change_constant(model, ".window", lambda window: np.maximum(window - 1, 0)))


def _sink_dropped(bundle: Path, manifest: Manifest) -> None:
    from sinkring.exporter.conformance.edited_copy import change_constant, edit_graph

    def without_last(sink_from: Any) -> Any:
        never = np.iinfo(np.int64).max
        sink_from[..., np.flatnonzero(sink_from.ravel() < never)[-1]] = never
        return sink_from

    for path in {graph.cpu_path for graph in manifest.graphs}:
        edit_graph(bundle, path, lambda model: change_constant(model, ".sink_from", without_last))


# float32, float16, bfloat16 in ONNX.
_FLOATS = (1, 10, 16)


def _ignored_weight(bundle: Path, manifest: Manifest) -> None:
    """The last norm is read from a copy: the graph computes what it did, and the weight itself is dead."""
    from sinkring.exporter.conformance.edited_copy import edit_graph

    def ignore(model: Any) -> None:
        norm = [tensor for tensor in model.graph.initializer if tensor.data_type in _FLOATS and len(tensor.dims) == 1][-1]
        copy = model.graph.initializer.add()
        copy.CopyFrom(norm)
        copy.name = f"{norm.name}.copy"
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                if name == norm.name:
                    node.input[index] = copy.name

    edit_graph(bundle, _decode_path(manifest), ignore)


def _scale_shifted(bundle: Path, manifest: Manifest) -> None:
    """Every block, or every output, of a quantized weight takes the scale of the one before it."""
    from onnx import numpy_helper
    from sinkring.exporter.conformance.edited_copy import edit_graph

    def shift(model: Any) -> None:
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type != "DequantizeLinear":
                continue
            stem = node.input[0].rsplit(".", 1)[0]
            for name in (node.input[1], f"{stem}.ratios", f"{stem}.ratios.rows"):
                if name in constants and constants[name].dims:
                    array = numpy_helper.to_array(constants[name], base_dir=str(bundle))
                    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
                    moved = np.roll(array, 1, axis if array.shape[axis] > 1 and name == node.input[1] else int(np.argmax(array.shape)))
                    constants[name].CopyFrom(numpy_helper.from_array(moved, name))

    edit_graph(bundle, _decode_path(manifest), shift)


SABOTEURS = (
    Saboteur(
        "clamped-write", ("I1",), "a chunk that would pass the ring's end is written further up", _clamped_write, needs=("wraps", "chunks")
    ),
    Saboteur("window-short", ("I2", "I3"), "the mask of every graph is one token short", edit=_window_short, needs=("window", "wraps")),
    Saboteur("sink-dropped", ("I2", "I3"), "the last sink is never attended to", edit=_sink_dropped, needs=("sinks",)),
    Saboteur("slots-as-positions", ("I2", "I3"), "the graphs are told slots as positions", _slots_as_positions, needs=("wraps",)),
    Saboteur("row-beside", ("I2", "I3"), "a new row goes to the slot behind its own", _row_beside, needs=("rows form",)),
    Saboteur("row-early", ("I2", "I3"), "what the step before gave out is written before the step", _row_early, needs=("rows form",)),
    Saboteur("row-crosstalk", ("I4",), "what row 0 writes is written to row 1 too", _row_crosstalk, needs=("rows",)),
    Saboteur("counter-survives", ("I4",), "a stream on a used row starts at the old position", _counter_survives),
    Saboteur("reset-counter-only", ("I5",), "a reset leaves the state as it is", _reset_counter_only),
    Saboteur("snapshot-aliases", ("I6",), "a captured stream shares the live buffers", _snapshot_aliases),
    Saboteur("snapshot-loses-head", ("I6",), "a snapshot keeps the slot in place of the position", _snapshot_loses_head, needs=("wraps",)),
    Saboteur("snapshot-unchecked", ("I6",), "a snapshot's hash is not compared", _snapshot_unchecked),
    Saboteur("torn-write", ("I6",), "a snapshot is written where the old one lies", _torn_write, needs=("full",)),
    Saboteur("rollback-off-by-one", ("I7",), "a rollback takes back one token too few", _rollback_off_by_one, needs=("slack",)),
    Saboteur(
        "window-believed",
        ("I7",),
        "the runtime takes the window for one shorter than it is",
        _window_believed,
        needs=("wraps",),
    ),
    Saboteur("growing-buffer", ("I8",), "each step keeps 32 logits", _growing_buffer),
    Saboteur("float32-positions", ("I9",), "positions are rounded to float32", _float32_positions, needs=("wraps", "angles")),
    Saboteur("ignored-weight", ("I10",), "one weight of the decode graph is not read", edit=_ignored_weight),
    Saboteur("scale-shifted", ("I2", "I3"), "each block of a weight has its neighbour's scale", edit=_scale_shifted, needs=("quantized",)),
    Saboteur("refusal-swallowed", ("I11",), "ids outside the vocabulary are wrapped into it", _refusal_swallowed),
    Saboteur("one-form-short", ("I12",), "one decode graph's mask is one token short", edit=_one_form_short, needs=("window", "wraps")),
)
