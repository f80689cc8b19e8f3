"""Snapshot files: a stream on disk, whole or not at all, refused when damaged or of another bundle.

A safetensors file: one row of every state tensor by its name, the last logits, and in its metadata, under the key `sinkring`, a JSON
object of the format's version, the bundle's identity, the stream's counters and sampler, and a sha256 over all of it.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from sinkring.runtime.errors import BundleError, DependencyError, InputError
from sinkring.runtime.manifest import Manifest

FORMAT_VERSION = 1
LOGITS = "logits"
_KEY = "sinkring"


def identity(manifest: Manifest) -> str:
    """What a snapshot must share with a bundle to go on in it: weights, policy, dtype, rings, states; not batch, chunk or targets."""
    content = {
        "weights": sorted(file.sha256 for file in manifest.files if file.path == "weights.bin"),
        "policy": manifest.policy,
        "dtype": manifest.dtype,
        "rings": [dataclasses.asdict(ring.geometry) for ring in manifest.rings],
        "states": [(state.name, state.kind, _row_shape(manifest, state.name), state.dtype) for state in manifest.states],
        "vocab_size": manifest.model.vocab_size,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_snapshot(path: Path, manifest: Manifest, stream: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write beside `path`, flush to the disk, rename. Raises InputError when that fails; an older file is then still there."""
    safetensors = _safetensors()
    record = {"format_version": FORMAT_VERSION, "identity": identity(manifest), "stream": stream}
    record["sha256"] = _digest(record, tensors)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(safetensors.save(tensors, {_KEY: json.dumps(record)}))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise InputError(f"snapshot {path}: could not be written ({error.strerror}); give a path in a writable folder") from error
    finally:
        beside.unlink(missing_ok=True)


def read_snapshot(path: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The stream's record and tensors. Raises BundleError for a file that is missing, damaged, altered, or of another bundle."""
    safetensors = _safetensors()
    try:
        data = path.read_bytes()
        tensors = safetensors.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        record = json.loads(header["__metadata__"][_KEY])
        version, said, digest = record["format_version"], record["identity"], record.pop("sha256")
    except OSError as error:
        raise BundleError(f"snapshot {path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # safetensors raises a class of its own
        raise BundleError(f"snapshot {path}: truncated or not a snapshot ({type(error).__name__}: {error}); use another one") from None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"snapshot {path}: format version is {version!r}, this sinkring reads {FORMAT_VERSION}; use the sinkring that wrote it"
        )
    if _digest(record, tensors) != digest:
        raise BundleError(f"snapshot {path}: its content is not what was written, sha256 differs; use another one")
    if said != identity(manifest):
        raise BundleError(
            f"snapshot {path}: was taken from another bundle ({said[:12]}..., this one is {identity(manifest)[:12]}...): "
            "weights, policy, rings and dtype must be the same"
        )
    return record["stream"], tensors


def _row_shape(manifest: Manifest, name: str) -> list[int]:
    (state,) = [state for state in manifest.states if state.name == name]
    return [1 if axis == state.batch_axis else size for axis, size in enumerate(state.shape)]


def _digest(record: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise DependencyError("snapshots need the package safetensors: pip install 'sinkring[snapshots]'") from None
    return safetensors.numpy
