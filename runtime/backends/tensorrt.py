"""TensorRT and TensorRT-RTX: the engines that `sinkring build` made, on one NVIDIA GPU."""

from pathlib import Path
from typing import Any

from sinkring.runtime.backends.cuda import Device
from sinkring.runtime.backends.device_backend import DeviceBackend
from sinkring.runtime.backends.engine import TURING, LoadedEngine, engine_target, load_tensorrt
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import PORTABLE_TARGET, Manifest


def open_tensorrt(bundle: Path, manifest: Manifest, name: str, target: str, *, cuda_graph: bool = True, **unknown: Any) -> DeviceBackend:
    """name: "tensorrt", "tensorrt-rtx" or "tensorrt-10.3". cuda_graph=False enqueues each step by itself, to tell apart what is at fault.

    Raises InputError for an unknown option, DependencyError without the packages, a driver or a GPU, BundleError for engines that are
    missing, stale or not as the manifest says, DeviceError when the GPU's memory does not suffice.
    """
    if unknown:
        raise InputError(f"option {sorted(unknown)[0]!r} is not known to the backend {name}; it takes: cuda_graph")
    if not isinstance(cuda_graph, bool):
        raise InputError(f"cuda_graph={cuda_graph!r}: must be True or False")
    manifest.graph("decode", engine_target(manifest, target, TURING))
    if target != name:
        raise InputError(f"target {target!r} with backend {name!r}: it runs the engines of its own target; leave out target")
    trt = load_tensorrt(name)
    device = Device(name, extra="tensorrt" if name == PORTABLE_TARGET else name)
    return DeviceBackend(name, manifest, device, lambda role: LoadedEngine(trt, device, bundle, manifest, role, name), cuda_graph)
