"""Backends: what runs the graphs. A backend owns the state tensors and every buffer; all are allocated when it is opened."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import PORTABLE_TARGET, Manifest


class Backend(Protocol):
    """One opened bundle on one device.

    The caller fills `input` (token ids int64 [B,1], or embedded rows float32 [B,1,hidden]: the manifest says which), `position` int64
    [B] and `write_index` (one int64 [B] per ring) and calls `decode`, which steps all rows and fills `logits` float32 [B,1,V]. The arrays
    are the same objects for the backend's whole life.
    """

    name: str
    device: str  # "cpu", or the GPU's name
    input: np.ndarray
    position: np.ndarray
    write_index: tuple[np.ndarray, ...]
    logits: np.ndarray
    most_top_k: int  # `extend` samples from so many tokens; 1: takes the likeliest, 0: cannot be called

    def decode(self, idle: Sequence[int] = ()) -> None:
        """One step of every row. The state of the rows in `idle` is afterwards what it was before, to the bit."""

    def extend(self, inputs: dict[str, np.ndarray], idle: Sequence[int] = ()) -> np.ndarray:
        """n steps of every row, each fed the token that the one before picked, without the host in between.

        inputs: `position`, each ring's write index and, where most_top_k is above 1, those of device_sampling by name, int64 [n,B]. Returns
        the tokens that were picked, int64 [n,B].
        """
        ...

    def prefill(self, row: int, fed: np.ndarray, position: int, write_index: tuple[int, ...], wanted: int) -> np.ndarray:
        """Feed T <= chunk tokens, int64 [T] or float32 [T,hidden], to one row.

        Returns the logits of the last `wanted` of them, 0 <= wanted <= T, float32 [wanted,V]: overwritten by the next call.
        """
        ...

    def read_row(self, row: int) -> dict[str, np.ndarray]:
        """Copies of the row's state, by state name."""
        ...

    def write_row(self, row: int, state: dict[str, np.ndarray]) -> None:
        """Overwrite the row's state with arrays as `read_row` gives them."""

    def reset_row(self, row: int) -> None:
        """Every state of the row back to its initial value, whatever it holds."""

    def addresses(self) -> dict[str, int]:
        """Address of each state tensor, by name: they never change."""
        ...

    def close(self) -> None:
        """Give back sessions and memory. Nothing else may be called afterwards."""


def proving_target(manifest: Manifest) -> str:
    """Whose graphs ONNX Runtime runs unless told otherwise."""
    targets = [graph.target for graph in manifest.graphs]
    return "onnxruntime" if "onnxruntime" in targets or not targets else targets[0]


def open_backend(name: str, bundle: Path, manifest: Manifest, target: str | None, options: dict[str, Any]) -> Backend:
    """Open the backend called `name`. `target` picks the graphs by what they were lowered for; by default the backend's own, and where
    ONNX Runtime has none those of the first target, which are proven in it.
    """
    if name == "onnxruntime" and options.get("device", "cpu") != "cpu":
        from sinkring.runtime.backends.onnxruntime_cuda import open_onnxruntime_cuda

        return open_onnxruntime_cuda(bundle, manifest, target or proving_target(manifest), **options)
    if name == "onnxruntime":
        from sinkring.runtime.backends.onnxruntime import OnnxRuntimeBackend

        return OnnxRuntimeBackend(bundle, manifest, target or proving_target(manifest), **options)
    if name in ("tensorrt", "tensorrt-rtx", PORTABLE_TARGET):
        from sinkring.runtime.backends.tensorrt import open_tensorrt

        return open_tensorrt(bundle, manifest, name, target or name, **options)
    raise UnsupportedError(f"backend {name!r} is not known; use onnxruntime, tensorrt, tensorrt-rtx or {PORTABLE_TARGET}")
