"""A builder's log becomes kernels, whatever stands between their lines."""

from pathlib import Path

import pytest
from sinkring.exporter.plan_kernels import PlanTensor, read_kernels, read_scratch_bytes, read_weight_bytes
from sinkring.runtime.errors import BuildError

DATA = Path(__file__).parent / "data"

LINE = (
    "Name: __myl_Scat_myl0_4, LayerType: kgen, "
    "Inputs: [ { Name: cache.0.k.updated, Dimensions: [1,2,32,16], Strides: [1024,512,16,1], StrideOrder: [3,2,1,0], Datatype: Float, "
    "Format: (Linear) Row major linear format }, { Name: one, Dimensions: [], Datatype: Int64, Format: x }], "
    "Constants: [ { Name: table, Dimensions: [1], Datatype: Float, Format: x }], "
    "Outputs: [ { Name: rows, Dimensions: [1,-1,16], Datatype: Half, Format: x }, "
    "{ Name: mask, Dimensions: [4], Datatype: Bool, Format: x }], "
    "TacticName: t, StreamId: 0, Metadata: [ONNX Layer: node_a][ONNX Layer: node b/c]"
)


def test_a_line_is_read_in_full() -> None:
    (kernel,) = read_kernels(
        f"Engine generation completed in 0.1 seconds.\nLayers:\n{LINE}\n\nI/O Tensors:\n Name: rows, IOMode: Output, DataType: Float"
    )
    assert kernel.name == "__myl_Scat_myl0_4"
    assert kernel.kind == "kgen"
    assert kernel.inputs == (PlanTensor("cache.0.k.updated", (1, 2, 32, 16), "Float"), PlanTensor("one", (), "Int64"))
    assert kernel.outputs == (PlanTensor("rows", (1, -1, 16), "Half"), PlanTensor("mask", (4,), "Bool"))
    assert kernel.nodes == ("node_a", "node b/c")


def test_sizes_know_dtypes_and_dynamic_axes() -> None:
    assert PlanTensor("x", (1, 2, 32, 16), "Half").bytes == 2048
    assert PlanTensor("x", (), "Int64").bytes == 8
    assert PlanTensor("x", (1, -1, 16), "Half").elements is None
    assert PlanTensor("x", (1, -1, 16), "Half").bytes is None


def test_kernels_without_inputs_or_constants_are_read() -> None:
    line = (
        "Name: fill, LayerType: kgen, Inputs: [], Outputs: [ { Name: zero, Dimensions: [1], Datatype: Int32 }], TacticName: , StreamId: 0"
    )
    (kernel,) = read_kernels(line)
    assert (kernel.inputs, kernel.outputs) == ((), (PlanTensor("zero", (1,), "Int32"),))


def test_a_log_without_kernels_gives_none() -> None:
    assert read_kernels("Name: cache.0.k, IOMode: Input, DataType: Float, Dimensions: [1,3,256,64]\nLayers:\n") == ()
    assert read_scratch_bytes("Layers:\n") is None


def test_every_recorded_line_is_understood() -> None:
    recorded = sorted(DATA.glob("*.plan.txt"))
    assert len(recorded) >= 9
    for path in recorded:
        text = path.read_text(encoding="utf-8")
        assert len(read_kernels(text)) == text.count(", LayerType: "), path.name
        silent = [kernel for kernel in read_kernels(text) if not kernel.outputs]
        assert all(kernel.kind == "shape_call" for kernel in silent), path.name


def test_a_kernel_line_of_unknown_form_is_an_error() -> None:
    with pytest.raises(BuildError, match="unknown form"):
        read_kernels(LINE.replace("Outputs: [", "Results: ["))


def test_memory_lines_are_read() -> None:
    text = "Max Scratch Memory: 5 bytes\nTotal Activation Memory: 1536 bytes\nTotal Weights Memory: 77 bytes"
    assert (read_scratch_bytes(text), read_weight_bytes(text)) == (1536, 77)
