"""The sampling head, run by ONNX Runtime as it stands, against numpy's sampler, and what TensorRT-RTX makes of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from sinkring.exporter.build import build_engine
from sinkring.exporter.builder_options import BuilderOptions
from sinkring.exporter.sampling_head import append_sampling_head
from sinkring.runtime.device_sampling import DRAW, GREEDY, TEMPERATURE, TOP_K, sampling_inputs
from sinkring.runtime.errors import InputError
from sinkring.runtime.sampling import Sampler, SamplingOptions

from tests.exporter.hand_bundle import CHUNK, ring_graph, write_bundle

VOCAB, KEPT = 97, 12
RANDOM = np.random.default_rng(0)


def only_logits(batch: int) -> onnx.ModelProto:
    """A graph that hands its input on as `logits`."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 1, VOCAB]) for name in ("given", "logits")]
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["logits"])], "logits", tensors[:1], tensors[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


class Head:
    def __init__(self, batch: int = 1, change: Any = None) -> None:
        model = append_sampling_head(only_logits(batch), KEPT)
        if change is not None:
            change(model)
        onnx.checker.check_model(model, full_check=True)
        self._session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def pick(self, logits: np.ndarray, inputs: dict[str, np.ndarray]) -> list[int]:
        """logits float32 [B,V], inputs int64 [B]: a token for each row."""
        (token,) = self._session.run(["next_token"], {"given": logits[:, None], **inputs})
        assert token.shape == (len(logits), 1)
        return [int(one) for one in token[:, 0]]


@pytest.fixture(scope="module")
def head() -> Head:
    return Head()


def disagreements(head: Head, options: SamplingOptions, steps: int) -> int:
    """In how many of `steps` draws, each from other logits, the head and the sampler pick different tokens."""
    sampler, ahead = Sampler(options, VOCAB), Sampler(options, VOCAB)
    inputs = sampling_inputs(options, ahead.draws(steps))
    different = 0
    for step in range(steps):
        logits = (3 * RANDOM.standard_normal((1, VOCAB))).astype(np.float32)
        (picked,) = head.pick(logits, {name: values[step : step + 1] for name, values in inputs.items()})
        different += picked != sampler.sample(logits[0])
    return different


@pytest.mark.parametrize("temperature", [0.001, 0.1, 0.7, 1.0, 3.0, 1000.0])
@pytest.mark.parametrize("top_k", [1, 2, 7, KEPT])
def test_the_same_seed_gives_the_tokens_of_the_sampler(head: Head, temperature: float, top_k: int) -> None:
    assert disagreements(head, SamplingOptions(temperature=temperature, top_k=top_k, seed=7), 300) == 0


def test_without_temperature_it_is_the_likeliest(head: Head) -> None:
    assert disagreements(head, SamplingOptions(), 50) == 0


@pytest.mark.parametrize("name", ["sample.ranks", "sample.sample.draw.unit", "sample.sample.temperature.unit"])
def test_a_head_that_is_a_little_wrong_is_noticed(name: str) -> None:
    """The control: one rank too many, draws or temperatures off by a tenth."""

    def change(model: onnx.ModelProto) -> None:
        (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
        array = numpy_helper.to_array(tensor)
        wrong = array - 1 if name.endswith("ranks") else array * np.float32(0.9)
        tensor.CopyFrom(numpy_helper.from_array(wrong.astype(np.float32), name))

    assert disagreements(Head(change=change), SamplingOptions(temperature=1.0, top_k=7, seed=7), 300) > 3


def test_the_frequencies_are_the_probabilities() -> None:
    options = SamplingOptions(temperature=1.3, top_k=6)
    logits = RANDOM.standard_normal((1, VOCAB)).astype(np.float32)
    draws = 20_000
    head, expected = Head(batch=draws), Sampler(options, VOCAB).probabilities(logits[0])
    inputs = sampling_inputs(options, np.random.default_rng(5).random(draws))
    counts = np.bincount(head.pick(np.repeat(logits, draws, axis=0), inputs), minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    deviations = np.abs(counts - draws * expected) / np.sqrt(draws * expected * (1 - expected) + 1e-9)
    assert deviations[expected > 0].max() < 5


def test_rows_are_their_own_and_draws_at_the_ends_stay_inside() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 5:9] = 2.0
    last = (1 << 24) - 1
    inputs = {DRAW: np.array([0, last, last, last]), TEMPERATURE: np.full(4, GREEDY[TEMPERATURE]), TOP_K: np.array([4, 4, 2, 1])}
    # Among equals the lower id stays.
    assert Head(batch=4).pick(logits, inputs) == [5, 8, 6, 5]


def test_the_graph_before_it_stays_as_it_was() -> None:
    plain = ring_graph()
    headed = append_sampling_head(plain, KEPT)
    assert list(headed.graph.node)[: len(plain.graph.node)] == list(plain.graph.node)
    assert [tensor.name for tensor in headed.graph.output] == [*(tensor.name for tensor in plain.graph.output), "next_token"]
    assert {node.op_type for node in headed.graph.node[len(plain.graph.node) :]}.isdisjoint({"Loop", "Scan", "CumSum", "If"})


def test_a_plan_with_it_keeps_its_promises(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    bundle = write_bundle(tmp_path / "bundle", {"decode": ring_graph(), "prefill": ring_graph(tokens=CHUNK, attend="folded")})
    proven = (bundle / "decode.onnx").read_bytes()
    decode, prefill = build_engine(bundle, sample_top_k=KEPT)
    assert decode.faults == prefill.faults == ()
    assert all(update.in_place for update in decode.plan.layers[0].updates)
    assert (decode.sample_top_k, prefill.sample_top_k) == (KEPT, None)
    assert json.loads((bundle / decode.engine_path).with_suffix(".json").read_text())["sample_top_k"] == KEPT
    assert (bundle / "decode.onnx").read_bytes() == proven


@pytest.mark.parametrize("top_k", [1, 1025, True, 2.5])
def test_a_number_of_candidates_out_of_range_is_refused(top_k: Any) -> None:
    with pytest.raises(InputError, match=r"sample_top_k=.*: must be a whole number, 2 to 1024"):
        BuilderOptions(sample_top_k=top_k)


def test_both_ways_of_picking_at_once_are_refused() -> None:
    with pytest.raises(InputError, match="next_token and sample_top_k=4: an engine that samples picks the likeliest token as well"):
        BuilderOptions(next_token=True, sample_top_k=4)
