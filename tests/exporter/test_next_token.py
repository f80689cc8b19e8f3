"""A decode engine picks the likeliest token: on the parsed network, and in the plan of the real builder."""

from pathlib import Path

import onnx
import pytest
from sinkring.exporter.build import build_engine
from sinkring.exporter.engine_builder import compile_engine
from sinkring.exporter.next_token import add_next_token
from sinkring.exporter.plan_kernels import read_kernels

from tests.exporter.hand_bundle import CHUNK, ring_graph, write_bundle

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")


def outputs(model: onnx.ModelProto) -> dict[str, tuple[str, tuple[int, ...]]]:
    log = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(log).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse(model.SerializeToString())
    add_next_token(trt, network)
    tensors = [network.get_output(index) for index in range(network.num_outputs)]
    return {tensor.name: (tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors}


def test_a_decode_network_gains_one_output_that_can_be_the_next_input() -> None:
    assert outputs(ring_graph())["next_token"] == ("INT64", (1, 1))
    assert outputs(ring_graph()).keys() == {"logits", "cache.0.k.updated", "cache.0.v.updated", "next_token"}


def test_a_prefill_network_stays_as_it_is() -> None:
    assert "next_token" not in outputs(ring_graph(tokens=CHUNK, attend="folded"))


def test_the_plan_gains_a_top_k_and_keeps_its_promises(tmp_path: Path) -> None:
    graphs = {"decode": ring_graph(), "prefill": ring_graph(tokens=CHUNK, attend="folded")}
    bundle = write_bundle(tmp_path / "bundle", graphs)
    plain = compile_engine(trt, "tensorrt-rtx", bundle / "decode.onnx", 89, {})
    decode, prefill = build_engine(bundle, next_token=True)
    assert decode.faults == prefill.faults == ()
    assert len(read_kernels(plain.plan_text)) < decode.plan.kernels <= len(read_kernels(plain.plan_text)) + 4
