"""The doubles of CUDA and TensorRT would notice a call that the real ones do not take."""

import numpy as np
import pytest

from tests.runtime.cuda_double import STREAM, CudaDouble, real
from tests.runtime.tensorrt_double import like
from tests.runtime.tensorrt_double import real as trt


def test_a_misspelt_or_misfed_cuda_call_fails() -> None:
    cuda = CudaDouble()
    with pytest.raises(AttributeError):
        _ = cuda.cudaMallocDevice
    with pytest.raises(TypeError):
        cuda.cudaMalloc(1, 2)
    with pytest.raises(AssertionError, match="kind is no cudaMemcpyKind"):
        cuda.cudaMemcpyAsync(0, 0, 0, 1, STREAM)
    with pytest.raises(AssertionError, match="does not know it yet"):
        cuda.cudaMallocManaged(1, 1)


def test_memory_is_poisoned_bounded_and_late() -> None:
    cuda = CudaDouble()
    _, address = cuda.cudaMalloc(8)
    _, host = cuda.cudaMallocHost(8)
    assert np.isnan(cuda.bytes_at(address, 8).view(np.float32)).all()
    kind = real.cudaMemcpyKind.cudaMemcpyDeviceToHost
    cuda.bytes_at(address, 8)[:] = 1
    cuda.cudaMemcpyAsync(host, address, 8, kind, STREAM)
    assert (cuda.bytes_at(host, 8, pinned=True) != 1).all()
    cuda.cudaStreamSynchronize(STREAM)
    assert (cuda.bytes_at(host, 8, pinned=True) == 1).all()
    with pytest.raises(AssertionError, match=r"9 bytes at .* are not within device memory"):
        cuda.cudaMemsetAsync(address, 0, 9, STREAM)


def test_a_method_that_tensorrt_lacks_or_other_arguments_fail() -> None:
    with pytest.raises(AttributeError):
        like(trt.ICudaEngine)(type("Engine", (), {"get_tensor_names": lambda self: []}))
    with pytest.raises(AssertionError, match="method or property"):
        like(trt.ICudaEngine)(type("Engine", (), {"num_io_tensors": lambda self: 0}))
    context = like(trt.IExecutionContext)(type("Context", (), {"set_tensor_address": lambda self, *_: True}))()
    assert context.set_tensor_address("tokens", 256)
    for wrong in (("tokens",), (256, "tokens"), ("tokens", "256"), ("tokens", 256, 0)):
        with pytest.raises(AssertionError, match="fits none"):
            context.set_tensor_address(*wrong)
