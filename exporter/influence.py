"""A graph of a bundle in ONNX Runtime by itself, without sinkring's runtime, to see whether what it reads changes its logits.

Its weights are declared as inputs too, so that one run can be given another one: nothing is written, no session is opened twice, and only
the changed tensor is in memory beside the file, which is mapped.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from sinkring.exporter.edited_session import open_edited, run_session
from sinkring.exporter.graph_tail import (
    SOME_LOGITS,
    crossing_values,
    first_readers,
    tail_of,
    tail_starts,
    with_outputs,
    with_some_logits,
)
from sinkring.runtime.bfloat16 import round_to_bfloat16, widen_bfloat16
from sinkring.runtime.embedding import EmbeddingTable
from sinkring.runtime.manifest import Manifest

# Of a tensor's own root mean square: as large as what it holds, so that its effect is far above rounding.
PERTURBATION = 1.0
# A slot's weight in the softmax may be a millionth: what it holds must change by enough to show through it.
SLOT_PERTURBATION = 1000.0
# Next tokens that must all leave the logits as they are before a weight or a slot counts as dead.
ATTEMPTS = 4
_PATTERN = np.random.default_rng(10).standard_normal(1021).astype(np.float32)
# Rows of a large weight are changed so many numbers at a time.
_BLOCK = 1 << 20


# Products and look-ups of weights of 4 or 8 bits.
BLOCK_OPERATORS = ("MatMulNBits", "GatherBlockQuantized", "DequantizeLinear", "MatMulIntegerToFloat")


@dataclass(frozen=True)
class Part:
    """Columns start .. stop-1 of a weight's last axis, which a Split behind it makes a weight of its own; all of them where none does."""

    weight: str
    start: int
    stop: int
    name: str

    @property
    def kind(self) -> str:
        """The same for the same part in every layer."""
        return f"{re.sub(r'[0-9]+', 'n', self.weight)}[{self.start}:{self.stop}]"


class ProbedGraph:
    """One graph of the bundle in `folder`, its inputs (`feeds`, which a caller may change between runs) and its weights at hand.

    Tokens are fed as `tokens`, int64 [B,T], also to a graph that takes embedded rows. logits are those of the first row's last token.
    parts: of all weights, in the order in which the graph reads them.
    Of matrices in blocks it is one of each kind: a product whose scales may change runs many times slower, so those have a session of their
    own. Of a large graph only the tail is run that reads what is changed: see graph_tail.
    """

    def __init__(self, folder: Path, path: str, feeds: dict[str, NDArray[Any]], manifest: Manifest) -> None:
        self._folder, self.feeds, self._vocab = folder, feeds, manifest.model.vocab_size
        self._embedding = None if manifest.embedding is None else EmbeddingTable(folder, manifest.embedding)
        model = onnx.load(folder / path, load_external_data=False)
        self._narrow = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == TensorProto.BFLOAT16}
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer if _is_weight(tensor)}
        self._first_reader = first_readers(model)
        in_order = sorted(self._weights, key=lambda name: self._first_reader.get(name, -1))
        parts = [part for name in in_order for part in _parts(model, self._weights[name])]
        of_blocks = {name for node in model.graph.node if node.op_type in BLOCK_OPERATORS for name in node.input}
        in_blocks = {part.kind: part for part in parts if part.weight in of_blocks}.values()
        self.parts = [part for part in parts if part.weight not in of_blocks or part in in_blocks]
        self._blocks = {part.weight for part in in_blocks}
        self._model = model
        self._plain = {name: tensor for name, tensor in self._weights.items() if name not in of_blocks}
        self._crossing = {start: crossing_values(model, start) for start in tail_starts(model, self._plain)}
        self._session = self._open(with_outputs(model, (name for names in self._crossing.values() for name in names)), set(self._plain))
        self._tails: dict[int, ort.InferenceSession] = {}
        self._entering: dict[int, dict[str, NDArray[Any]]] = {}
        self._some_logits = with_some_logits(model, "logits")
        self._right: dict[tuple[bool, int | None, int], NDArray[np.float32]] = {}

    def logits(self, changed: dict[str, NDArray[Any]], attempt: int) -> NDArray[np.float32]:
        """float32 [V]. In the first attempt after the tokens of the feeds, in others after different ones."""
        return self._logits(changed, attempt, self._touches_blocks(changed), None)

    def _logits(self, changed: dict[str, NDArray[Any]], attempt: int, blocks: bool, start: int | None) -> NDArray[np.float32]:
        """start: of a tail, whose logits may be some of all, or None for the whole graph."""
        feeds = {**self._given({**self.feeds, "tokens": self._tokens(attempt)}), **changed}
        if start is None:
            (out,) = run_session(self._block_session if blocks else self._session, ["logits"], feeds)
            found: NDArray[np.float32] = out[0, -1]
            return found
        entering = {name: self._values(attempt)[name] for name in self._crossing[start]}
        session = self._tail(start)
        # A weight that leads to no logit has no place in it.
        present = {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}
        fed = {name: array for name, array in {**feeds, **entering}.items() if name in present}
        (out,) = run_session(session, [self._tail_s_logits], fed)
        last: NDArray[np.float32] = out.reshape(len(feeds["position"]), -1, out.shape[-1])[0, -1]
        return last

    @property
    def _tail_s_logits(self) -> str:
        return "logits" if self._some_logits is None else SOME_LOGITS

    def _tokens(self, attempt: int) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = (self.feeds["tokens"] + attempt * 7) % self._vocab
        return tokens

    def _touches_blocks(self, changed: dict[str, NDArray[Any]]) -> bool:
        return not self._blocks.isdisjoint(changed)

    def _ways(self, changed: dict[str, NDArray[Any]]) -> list[int | None]:
        """How to see an effect, as in _logits: in the shortest tail that reads all of what is changed, and then in the whole graph."""
        if not self._crossing or self._touches_blocks(changed):
            return [None]
        first = min(self._first_reader.get(name, 0) for name in changed)
        return [max(start for start in self._crossing if start <= first), None]

    def _values(self, attempt: int) -> dict[str, NDArray[Any]]:
        """What enters the tails, by name, where nothing is changed."""
        if attempt not in self._entering:
            names = list(dict.fromkeys(name for names in self._crossing.values() for name in names))
            feeds = self._given({**self.feeds, "tokens": self._tokens(attempt)})
            self._entering[attempt] = dict(zip(names, run_session(self._session, names, feeds), strict=True))
        return self._entering[attempt]

    def _tail(self, start: int) -> ort.InferenceSession:
        if start not in self._tails:
            kinds = {node.name: node.type for node in self._session.get_outputs()}
            crossing = {
                name: (TensorProto.DataType.Value(kinds[name].removeprefix("tensor(").removesuffix(")").upper()), array.shape)
                for name, array in self._values(0).items()
                if name in self._crossing[start]
            }
            tail = tail_of(self._some_logits or self._model, start, crossing, self._tail_s_logits)
            self._tails[start] = self._open(tail, {tensor.name for tensor in tail.graph.initializer if tensor.name in self._plain})
        return self._tails[start]

    @cached_property
    def _block_session(self) -> ort.InferenceSession:
        return self._open(self._model, self._blocks)

    def _open(self, graph: onnx.ModelProto, weights: set[str]) -> ort.InferenceSession:
        """A session of the graph in which these weights are inputs, too, with their own numbers unless others are given."""
        model = onnx.ModelProto()
        model.CopyFrom(graph)
        for name in sorted(weights):
            tensor = self._weights[name]
            model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
        # What is packed when a session opens holds the scales of that moment, whatever a run is given.
        return open_edited(model, self._folder, prepacked=self._blocks.isdisjoint(weights) and bool(self._blocks), spinning=False)

    def outputs(self, names: Sequence[str]) -> list[NDArray[Any]]:
        """Of one run with the feeds as they are."""
        return run_session(self._session, names, self._given(self.feeds))

    def _given(self, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if self._embedding is None:
            return feeds
        others = {name: array for name, array in feeds.items() if name != "tokens"}
        tokens = feeds["tokens"]
        return {**others, "embeddings": self._embedding.of_tokens(tokens.ravel()).reshape(*tokens.shape, -1)}

    def effect(self, changed: dict[str, NDArray[Any]]) -> float:
        """Largest |change| of a logit, in a large vocabulary of the first that show one. Infinite where one is not finite.

        One token may by chance look so little at itself that its own key and value vanish in rounding.
        """
        # Sessions round differently: each is held to itself.
        blocks = self._touches_blocks(changed)
        for attempt in range(ATTEMPTS):
            for start in self._ways(changed):
                if (blocks, start, attempt) not in self._right:
                    self._right[blocks, start, attempt] = self._logits({}, attempt, blocks, start)
                if effect := largest_difference(self._logits(changed, attempt, blocks, start), self._right[blocks, start, attempt]):
                    return effect
        return 0.0

    def changed_weight(self, part: Part) -> dict[str, NDArray[Any]]:
        tensor = self._weights[part.weight]
        narrow = tensor.data_type == TensorProto.BFLOAT16
        array = np.array(self._read(tensor))
        with _numbers(array, narrow) as numbers:
            add_noise(numbers[..., part.start : part.stop], PERTURBATION)
        return {part.weight: array}

    def changed_state(self, state: str, slots: Sequence[int] | None = None) -> dict[str, NDArray[Any]]:
        """The whole of the state, or by more the rows in `slots` of its second last axis."""
        array = self.feeds[state].copy()
        with _numbers(array, state in self._narrow) as numbers:
            if slots is None:
                add_noise(numbers, PERTURBATION)
            for slot in slots or ():
                add_noise(numbers[..., slot, :], SLOT_PERTURBATION)
        return {state: array}

    def _read(self, tensor: TensorProto) -> NDArray[Any]:
        """As numpy holds it: bfloat16 as its bits, uint16."""
        narrow = tensor.data_type == TensorProto.BFLOAT16
        if not external_data_helper.uses_external_data(tensor):
            array = numpy_helper.to_array(tensor)
            return array.view(np.uint16) if narrow else array
        where = external_data_helper.ExternalDataInfo(tensor)
        dtype = np.dtype(np.uint16) if narrow else helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(self._folder / where.location, dtype, "r", where.offset or 0, tuple(tensor.dims))


@contextmanager
def _numbers(array: NDArray[Any], narrow: bool) -> Iterator[NDArray[Any]]:
    """The array itself, to be changed; of the bits of bfloat16 (`narrow`) their numbers, which are rounded back at the end."""
    if not narrow:
        yield array
        return
    numbers = widen_bfloat16(array)
    yield numbers
    array[...] = round_to_bfloat16(numbers)


def largest_difference(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """max |actual - expected|, infinite where the shapes differ or a number is not finite."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    return float(np.abs(actual - expected).max(initial=0.0))


def add_noise(array: NDArray[Any], times: float) -> None:
    """In place, `times` the array's root mean square in size; the same for equal arrays."""
    rows = array[None] if array.ndim == 1 else array
    step = max(1, _BLOCK // max(1, rows[0].size))
    blocks = [rows[start : start + step] for start in range(0, len(rows), step)]
    squares = sum(float(np.square(block, dtype=np.float64).sum()) for block in blocks)
    scale = times * ((squares / array.size) ** 0.5 or 1.0)
    done = 0
    for block in blocks:
        block += np.resize(np.roll(_PATTERN, -(done % len(_PATTERN))), block.shape).astype(array.dtype) * array.dtype.type(scale)
        done += block.size


def _is_weight(tensor: TensorProto) -> bool:
    # What has one number is a constant of the form, like the scale or the mask's minus infinity: a wrong one fails the parity.
    return tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16) and int(np.prod(list(tensor.dims))) > 1


def _parts(model: onnx.ModelProto, tensor: TensorProto) -> list[Part]:
    """The columns that a Split behind the product with this weight takes apart."""
    columns = int(tensor.dims[-1])
    constants = {other.name: other for other in model.graph.initializer}
    # Also of a weight that is dequantized or cast first, and of what a product is multiplied with.
    read = _cast(model, tensor.name) | {
        node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear" and tensor.name in node.input
    }
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Mul") and not read.isdisjoint(node.input)]
    results = _cast(model, products[0].output[0]) if products else set()
    # Apart by columns, or by heads, which are as many columns each (see `SplitHeadsTogether`).
    reshaped = _behind(model, results, "Reshape")
    by_head = reshaped | _behind(model, reshaped, "Transpose")
    splits = [node for node in model.graph.node if node.op_type == "Split" and len(node.input) > 1]
    found = [node for node in splits if node.input[0] in results or (node.input[0] in by_head and _axis(node) == 1)]
    if not found:
        return [Part(tensor.name, 0, columns, _model_s_name(tensor.name))]
    counts = numpy_helper.to_array(constants[found[0].input[1]])
    sizes = (counts * (columns // counts.sum())).tolist()
    stops = np.cumsum(sizes).tolist()
    # A weight that was merged is called by the names of its parts; one that the model itself splits has one name.
    names = [_model_s_name(name) for name in tensor.name.split("+")]
    if len(names) != len(sizes):
        names = [f"columns {stop - size} to {stop} of {_model_s_name(tensor.name)}" for size, stop in zip(sizes, stops, strict=True)]
    return [Part(tensor.name, stop - size, stop, name) for size, stop, name in zip(sizes, stops, names, strict=True)]


def _cast(model: onnx.ModelProto, name: str) -> set[str]:
    """A tensor and what are but casts of it: in a widened graph they stand between a weight, its product and what takes that apart."""
    return {name} | _behind(model, {name}, "Cast")


def _behind(model: onnx.ModelProto, names: set[str], op_type: str) -> set[str]:
    """What nodes of this operator make of tensors of these names."""
    return {node.output[0] for node in model.graph.node if node.op_type == op_type and node.input[0] in names}


def _axis(node: onnx.NodeProto) -> int:
    """0, the operator's default, where none is said."""
    return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)


def _model_s_name(initializer: str) -> str:
    """What the model calls a weight: tracing puts `model.` before it, and storing it transposed a word behind it."""
    return initializer.removeprefix("model.").removesuffix(".transposed")
