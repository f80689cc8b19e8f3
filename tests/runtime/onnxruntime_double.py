"""A stand-in for the `onnxruntime` module with a GPU provider: the real library's CPU kernels over the CUDA double's "device" memory."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

from tests.runtime.cuda_double import STREAM, CudaDouble

GPU, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class OrtDouble:
    """The module, with a GPU provider that the CPU's kernels play. providers: what sessions asked for; on_cpu: operators left there."""

    def __init__(self, cuda: CudaDouble) -> None:
        self.cuda = cuda
        self.available, self.loads = [GPU, CPU], True
        self.providers: list[dict[str, str]] = []
        self.on_cpu: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def get_available_providers(self) -> list[str]:
        return self.available

    def InferenceSession(self, path: str, options: Any, providers: list[Any]) -> Any:  # noqa: N802
        if providers == [CPU]:
            return onnxruntime.InferenceSession(path, options, providers=providers)
        (name, chosen), fallback = providers
        assert (name, fallback) == (GPU, CPU)
        self.providers.append(chosen)
        return SessionDouble(self, onnxruntime.InferenceSession(path, options, providers=[CPU]))


class SessionDouble:
    def __init__(self, module: OrtDouble, session: Any) -> None:
        self._module, self._session = module, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get_providers(self) -> list[str]:
        return [GPU, CPU] if self._module.loads else [CPU]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        nodes = [node for part in self._session.get_provider_graph_assignment_info() for node in part.get_nodes()]
        left = self._module.on_cpu
        return [
            SimpleNamespace(ep_name=GPU, get_nodes=lambda: [node for node in nodes if node.op_type not in left]),
            SimpleNamespace(ep_name=CPU, get_nodes=lambda: [node for node in nodes if node.op_type in left]),
        ]

    def io_binding(self) -> "BindingDouble":
        return BindingDouble(self._module, self._session.io_binding())

    def run_with_iobinding(self, binding: "BindingDouble") -> None:
        """On the stream, and waited for, as ONNX Runtime does by default."""
        self._module.cuda.enqueue(lambda: self._session.run_with_iobinding(binding.real))
        self._module.cuda.cudaStreamSynchronize(STREAM)


class BindingDouble:
    def __init__(self, module: OrtDouble, real: Any) -> None:
        self._module, self.real = module, real

    def bind_input(self, *arguments: Any) -> None:
        self.real.bind_input(*self._checked(*arguments))

    def bind_output(self, *arguments: Any) -> None:
        self.real.bind_output(*self._checked(*arguments))

    def _checked(self, name: str, device: str, index: int, dtype: Any, shape: tuple[int, ...], address: int) -> tuple[Any, ...]:
        assert (device, index) == ("cuda", 0)
        self._module.cuda.bytes_at(address, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return name, "cpu", 0, dtype, shape, address
