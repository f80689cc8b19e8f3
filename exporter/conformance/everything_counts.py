"""I10, everything counts: each weight, each state and each sink slot of every graph changes the logits when it is changed.

The graph runs in ONNX Runtime by itself, without sinkring's runtime. Its weights are declared as inputs too, so that a run can be given
other ones for a moment: nothing is written and no session is opened twice.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Subject, largest_difference

# Of a tensor's own root mean square: as large as what it holds, so that its effect is far above rounding.
PERTURBATION = 1.0
# A slot's weight in the softmax may be a millionth: what it holds must change by enough to show through it.
SLOT_PERTURBATION = 1000.0
# Of each state, in the full suite: a run of the graph for each.
MOST_WINDOW_SLOTS = 16
# Next tokens that must all leave the logits as they are before a weight or a slot counts as dead.
ATTEMPTS = 4
_PATTERN = np.random.default_rng(10).standard_normal(1021).astype(np.float32)


@dataclass(frozen=True)
class Part:
    """Columns start .. stop-1 of a weight's last axis, which a Split behind it makes a weight of its own; all of them where none does."""

    weight: str
    start: int
    stop: int

    @property
    def kind(self) -> str:
        """The same for the same part in every layer."""
        return f"{re.sub(r'[0-9]+', 'n', self.weight)}[{self.start}:{self.stop}]"


def check_everything(subject: Subject) -> Check:
    """Quick: of each kind of weight one, the sinks of the first and last layer, of each state the oldest slot. Full: every weight, sink."""
    dead: list[str] = []
    faults: list[str] = []
    tried: list[str] = []
    smallest, which = float("inf"), ""
    states = _states_at_full_ring(subject)
    for path in sorted({graph.path for graph in subject.manifest.graphs}):
        graph = _Graph(subject, path, states)
        off = subject.off(graph.logits({}, 0), subject.full_at + graph.tokens - 1)
        if not off <= subject.tolerance:
            faults.append(f"{path}: is {off:.2e} from the oracle before anything is changed")
        parts, slots = graph.parts(subject.full), graph.slots(subject.full)
        tried.append(f"{path}: {len(parts)} weights, {len(slots)} slots of states")
        items: list[Part | tuple[str, int]] = [*parts, *slots]
        for done, item in enumerate(items):
            subject.say(f"I10: {path}", done, len(items))
            if isinstance(item, Part):
                name, changed = f"{item.weight}[{item.start}:{item.stop}]", graph.changed_weight(item)
            else:
                name, changed = f"slot {item[1]} of {item[0]}", graph.changed_slot(*item)
            effect = graph.effect(changed)
            if effect == 0:
                dead.append(f"{path}: {name}")
            elif effect < smallest:
                smallest, which = effect, f"{path}: {name}"
        subject.say(f"I10: {path}", 1, 1)
    detail = [f"dead: {', '.join(dead[:3])}"] if dead else [f"the smallest effect is {smallest:.2e}, of {which}"]
    return Check(
        "I10", "; ".join(tried), "dead tensors and slots", float(len(dead)), 0.0, not dead and not faults, "; ".join(faults + detail)
    )


def _states_at_full_ring(subject: Subject) -> dict[str, NDArray[Any]]:
    """Every state of the whole batch, each row filled with the same text up to `full_at`."""
    with subject.open() as decoder:
        streams = [decoder.stream() for _ in range(subject.manifest.batch)]
        for stream in streams:
            stream.feed(subject.ids[: subject.full_at])
        rows = [decoder.backend.read_row(row) for row in range(subject.manifest.batch)]
    return {state.name: np.concatenate([row[state.name] for row in rows], axis=state.batch_axis) for state in subject.manifest.states}


class _Graph:
    """One graph, its next tokens and state, and its weights at hand. logits are those of the first row's last token."""

    def __init__(self, subject: Subject, path: str, states: dict[str, NDArray[Any]]) -> None:
        self._subject = subject
        self._folder = subject.path
        manifest, at = subject.manifest, subject.full_at
        model = onnx.load(subject.path / path, load_external_data=False)
        decodes = path in {graph.path for graph in manifest.graphs if graph.role == "decode"}
        batch = manifest.batch if decodes else 1
        # Prefill is run with more than one token where it can, but not across the end of a ring.
        self.tokens = 1 if decodes else min(3, manifest.chunk, *(geometry.room(at) for geometry in subject.geometries))
        piece = subject.ids[at : at + self.tokens]
        self._states = {
            state.name: states[state.name] if decodes else states[state.name].take([0], axis=state.batch_axis) for state in manifest.states
        }
        self._feeds: dict[str, NDArray[Any]] = {
            "tokens": np.tile(piece, (batch, 1)),
            "position": np.full(batch, at, np.int64),
            **{ring.write_index: np.full(batch, ring.geometry.slot(at), np.int64) for ring in manifest.rings},
            **({} if decodes else {"rows": np.array([self.tokens - 1], np.int64)}),
            **self._states,
        }
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer if _is_weight(tensor)}
        self._parts = [part for tensor in self._weights.values() for part in _parts(model, tensor)]
        for tensor in self._weights.values():
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        self._session = _session(model, subject)
        self._right: dict[int, NDArray[np.float32]] = {}

    def logits(self, changed: dict[str, NDArray[Any]], attempt: int) -> NDArray[np.float32]:
        """float32 [V]. In the first attempt after the text's own tokens, in others after different ones."""
        tokens = (self._feeds["tokens"] + attempt * 7) % self._subject.manifest.model.vocab_size
        (out,) = self._session.run(["logits"], {**self._feeds, **changed, "tokens": tokens})
        found: NDArray[np.float32] = out[0, -1]
        return found

    def effect(self, changed: dict[str, NDArray[Any]]) -> float:
        """Largest |change| of a logit. One token may by chance look so little at itself that its own key and value vanish in rounding."""
        for attempt in range(ATTEMPTS):
            if attempt not in self._right:
                self._right[attempt] = self.logits({}, attempt)
            if effect := largest_difference(self.logits(changed, attempt), self._right[attempt]):
                return effect
        return 0.0

    def parts(self, every: bool) -> list[Part]:
        if every:
            return self._parts
        # The last of each kind: the layer whose effect has the shortest way, so that a dead one is not hidden by what follows.
        return list({part.kind: part for part in self._parts}.values())

    def slots(self, every: bool) -> list[tuple[str, int]]:
        """(state, slot): the sinks, and of the window the oldest token, or some from the oldest to the newest."""
        at, last = self._subject.full_at, self._subject.full_at + self.tokens - 1
        geometries = {state.name: self._subject.geometries[state.ring] for state in self._subject.manifest.states if state.ring is not None}
        with_sinks = [name for name, geometry in geometries.items() if geometry.sinks_tokens]
        ends = with_sinks if every or len(with_sinks) <= 8 else [*with_sinks[:2], *with_sinks[-2:]]
        found = [(name, slot) for name in ends for slot in range(min(geometries[name].sinks_tokens, at))]
        for name, geometry in geometries.items():
            window = range(max(geometry.sinks_tokens, last - geometry.window_tokens + 1), at)
            tokens = window[:: -(-len(window) // MOST_WINDOW_SLOTS)] if every and len(window) else window[:1]
            found += [(name, geometry.slot(token)) for token in tokens]
        return found

    def changed_weight(self, part: Part) -> dict[str, NDArray[Any]]:
        tensor = self._weights[part.weight]
        array = self._read(tensor).copy()
        columns = array[..., part.start : part.stop]
        columns += _noise(columns, PERTURBATION)
        return {part.weight: array}

    def changed_slot(self, state: str, slot: int) -> dict[str, NDArray[Any]]:
        array = self._states[state].copy()
        rows = array[..., slot, :]
        rows += _noise(rows, SLOT_PERTURBATION)
        return {state: array}

    def _read(self, tensor: TensorProto) -> NDArray[np.float32]:
        if not external_data_helper.uses_external_data(tensor):
            return numpy_helper.to_array(tensor)
        where = external_data_helper.ExternalDataInfo(tensor)
        return np.memmap(
            self._folder / where.location, helper.tensor_dtype_to_np_dtype(tensor.data_type), "r", where.offset or 0, tuple(tensor.dims)
        )


def _is_weight(tensor: TensorProto) -> bool:
    # What has one number is a constant of the form, like the scale or the mask's minus infinity: a wrong one fails the parity.
    return tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16) and int(np.prod(list(tensor.dims))) > 1


def _parts(model: onnx.ModelProto, tensor: TensorProto) -> list[Part]:
    """The columns that a Split behind the product with this weight takes apart."""
    columns = int(tensor.dims[-1])
    constants = {other.name: other for other in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and tensor.name in node.input]
    splits = [node for node in model.graph.node if node.op_type == "Split" and products and node.input[0] == products[0].output[0]]
    if not splits or len(splits[0].input) < 2:
        return [Part(tensor.name, 0, columns)]
    sizes = numpy_helper.to_array(constants[splits[0].input[1]]).tolist()
    stops = np.cumsum(sizes).tolist()
    return [Part(tensor.name, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _noise(array: NDArray[np.float32], times: float) -> NDArray[np.float32]:
    """Of the array's shape, `times` its root mean square in size; the same for equal arrays."""
    scale = times * (float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) or 1.0)
    return np.resize(_PATTERN, array.shape).astype(array.dtype) * array.dtype.type(scale)


def _session(model: onnx.ModelProto, subject: Subject) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # The model is given as bytes, so that its copy with more inputs is nowhere on disk; its weights lie where they did.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(subject.path))
    options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
