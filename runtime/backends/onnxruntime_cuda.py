"""ONNX Runtime on an NVIDIA GPU: the graphs as they are, in device memory that this runtime allocates and binds by address.

The session runs on the device's own stream, so that its work and the copies around it are in one order.
"""

import warnings
from pathlib import Path
from typing import Any

from sinkring.runtime.backends.cuda import Device
from sinkring.runtime.backends.device_backend import DeviceBackend
from sinkring.runtime.backends.onnxruntime import open_session, ort
from sinkring.runtime.bfloat16 import element_type
from sinkring.runtime.contract import expected_tensors
from sinkring.runtime.errors import DependencyError, DeviceError, InputError
from sinkring.runtime.manifest import Graph, Manifest

PROVIDER = "CUDAExecutionProvider"
_SHOWN = 8


def open_onnxruntime_cuda(
    bundle: Path, manifest: Manifest, target: str, *, device: str, cuda_graph: bool = False, **unknown: Any
) -> DeviceBackend:
    """device: "cuda". cuda_graph: ONNX Runtime captures the decode step and replays it; it needs every node on the GPU.

    Warns of nodes that do not run on the GPU, by name. Raises InputError for an option that is unknown, DependencyError without the
    packages, a driver or a GPU, BundleError for a graph that cannot be loaded or is not as the manifest says, DeviceError when the GPU's
    memory does not suffice.
    """
    if device != "cuda":
        raise InputError(f"device={device!r}: must be 'cpu' or 'cuda'")
    if unknown:
        raise InputError(f"option {sorted(unknown)[0]!r} is not known to the backend onnxruntime on cuda; it takes: device, cuda_graph")
    if not isinstance(cuda_graph, bool):
        raise InputError(f"cuda_graph={cuda_graph!r}: must be True or False")
    if PROVIDER not in ort.get_available_providers():
        raise DependencyError(
            f"device 'cuda': this onnxruntime {ort.__version__} has no {PROVIDER}; pip uninstall onnxruntime, then "
            "pip install 'sinkring[gpu]'"
        )
    gpu = Device("onnxruntime", extra="gpu")
    return DeviceBackend(
        "onnxruntime",
        manifest,
        gpu,
        # Only the shapes of a decode step never change, as a captured graph's must not.
        lambda role: CudaSession(bundle, manifest, manifest.graph(role, target), gpu, cuda_graph and role == "decode"),
        capture=False,
    )


class CudaSession:
    """See Program. cuda_graph: see open_onnxruntime_cuda."""

    scratch_bytes = 0  # ONNX Runtime's arena is its own.
    most_top_k = 0

    def __init__(self, bundle: Path, manifest: Manifest, graph: Graph, device: Device, cuda_graph: bool) -> None:
        self.path, self.update = graph.path, graph.update
        provider = {
            "device_id": "0",
            "user_compute_stream": str(device.stream),
            "enable_cuda_graph": "1" if cuda_graph else "0",
            # It rounds the factors of fp32 products to 10 bits.
            "use_tf32": "0",
        }
        options = ort.SessionOptions()
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if graph.role == "prefill":
            # A pattern is kept for each shape that was ever seen, and T varies.
            options.enable_mem_pattern = False
        self._session = open_session(bundle, manifest, graph, graph.path, options, [(PROVIDER, provider), "CPUExecutionProvider"])
        if PROVIDER not in self._session.get_providers():
            raise DependencyError(
                f"{graph.path}: onnxruntime {ort.__version__} could not load {PROVIDER}, its libraries of CUDA and cuDNN are missing or of "
                "another version; see https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html"
            )
        warn_of_cpu_nodes(graph.path, self._session.get_provider_graph_assignment_info())
        inputs, outputs = expected_tensors(manifest, graph.role, graph.update)
        self._types = {name: element_type(dtype) for name, (dtype, _) in {**inputs, **outputs}.items()}
        self._inputs = {node.name: tuple(node.shape) for node in self._session.get_inputs()}
        self._outputs = {node.name: tuple(node.shape) for node in self._session.get_outputs()}
        self._sizes: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self._unbound: set[str] = set()
        self._binding = self._session.io_binding()

    def use_scratch(self, address: int, size_bytes: int) -> None:
        pass

    def bind(self, name: str, address: int) -> None:
        self._addresses[name] = address
        self._unbound.add(name)

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        for axis, size in zip(self._inputs[name], shape, strict=True):
            if isinstance(axis, str) and self._sizes.get(axis) != size:
                self._sizes[axis] = size
                self._unbound |= {other for other, axes in (self._inputs | self._outputs).items() if axis in axes}

    def enqueue(self) -> None:
        for name in self._unbound:
            bind = self._binding.bind_input if name in self._inputs else self._binding.bind_output
            axes = self._inputs[name] if name in self._inputs else self._outputs[name]
            shape = tuple(self._sizes[axis] if isinstance(axis, str) else axis for axis in axes)
            bind(name, "cuda", 0, self._types[name], shape, self._addresses[name])
        self._unbound.clear()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises classes of its own for each status code
            what = " ".join(str(error).split())
            raise DeviceError(f"{self.path}: the run failed on the GPU ({what}); close the bundle and open it again") from error

    def capturable(self) -> bool:
        return False

    def close(self) -> None:
        del self._binding, self._session


def warn_of_cpu_nodes(path: str, assignment: Any) -> None:
    """Say which nodes of a graph run on the CPU: each costs a copy and a wait, and rules a CUDA graph out."""
    nodes = [(subgraph.ep_name, node) for subgraph in assignment for node in subgraph.get_nodes()]
    there = [f"{node.name} ({node.op_type})" for provider, node in nodes if provider != PROVIDER]
    if there:
        more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
        warnings.warn(
            f"{path}: {len(there)} of {len(nodes)} nodes do not run on the GPU: {', '.join(there[:_SHOWN])}{more}",
            RuntimeWarning,
            stacklevel=2,
        )
