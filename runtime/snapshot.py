"""Snapshot files: a stream on disk, whole or not at all, refused when damaged or of another bundle.

A safetensors file: one row of every state tensor by its name, the last logits, and in its metadata `sinkring`, a JSON object of the
format's version, the bundle's identity and the stream's counters and sampler, and `sha256`, that of the file with this one value zeroed:
no byte of the file, padding included, can change unseen. Caches of bfloat16 are stored as their bits, uint16.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from sinkring.runtime.bfloat16 import host_dtype
from sinkring.runtime.errors import BundleError, DependencyError, InputError
from sinkring.runtime.manifest import Manifest
from sinkring.runtime.sampling import Sampler, SamplingOptions
from sinkring.runtime.token_ids import NO_TOKEN

try:
    import fcntl
except ImportError:  # Windows: there, two processes must not write one snapshot at the same time
    fcntl = None  # type: ignore[assignment]

FORMAT_VERSION = 1
LOGITS = "logits"
_RECORD, _SHA256 = "sinkring", "sha256"
_NO_SHA256 = "0" * 64


def identity(manifest: Manifest) -> str:
    """What a snapshot must share with a bundle to go on in it: model, policy, dtype, rings, states; not batch, chunk or targets.

    A chunk so different that the ring has another number of slots is another ring.
    """
    content = {
        # Not of the bundle's weights file: small tensors and the configuration lie in the graphs, and graphs differ by batch.
        "model": manifest.model.source_sha256,
        "policy": manifest.policy,
        "dtype": manifest.dtype,
        "rings": [dataclasses.asdict(ring.geometry) for ring in manifest.rings],
        "states": [(state.name, state.kind, _row_shape(manifest, state.name), state.dtype, state.ring) for state in manifest.states],
        "vocab_size": manifest.model.vocab_size,
    }
    if manifest.embedding is not None:
        # Its history may have gaps, which a bundle that takes token ids has no use for.
        content["inputs"] = manifest.input_name
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_snapshot(path: Path, manifest: Manifest, stream: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write beside `path`, flush to the disk, rename. Raises InputError when that fails; an older file is then still there."""
    safetensors = _safetensors()
    record = {"format_version": FORMAT_VERSION, "identity": identity(manifest), "stream": stream}
    data = safetensors.save(tensors, {_RECORD: json.dumps(record), _SHA256: _NO_SHA256})
    at = data.index(_NO_SHA256.encode())
    try:
        if not path.name or path.is_dir():
            raise InputError(f"snapshot {path}: is a folder; give the path of a file in it")
        # A rename would put a file in a device's place.
        if path.exists() and not path.is_file():
            raise InputError(f"snapshot {path}: is a device, pipe or socket; give the path of a plain file")
        path = path.resolve()  # a link stays one
        with _put_in_place(path) as file:
            file.write(data[:at])
            file.write(hashlib.sha256(data).hexdigest().encode())
            file.write(memoryview(data)[at + len(_NO_SHA256) :])
    except (OSError, ValueError) as error:
        raise InputError(f"snapshot {path}: could not be written ({_reason(error)}); give a path in a writable folder") from error


def read_snapshot(path: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The stream's record and tensors. Raises BundleError for a file that is missing, damaged, altered, or of another bundle."""
    safetensors = _safetensors()
    try:
        # A pipe would be waited for, for ever.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise BundleError(f"snapshot {path}: is a device, pipe or socket; give the path of a plain file")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise BundleError(f"snapshot {path}: cannot be read ({_reason(error)}); use another one") from None
    try:
        tensors = safetensors.load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    except Exception as error:  # safetensors raises a class of its own
        raise BundleError(f"snapshot {path}: truncated or not a snapshot ({' '.join(str(error).split())}); use another one") from None
    if _RECORD not in metadata or _SHA256 not in metadata:
        raise BundleError(f"snapshot {path}: is a safetensors file, but not a snapshot, or damaged; use another one")
    try:
        record = json.loads(metadata[_RECORD])
        version = record["format_version"]
    except (ValueError, TypeError, KeyError) as error:
        raise BundleError(f"snapshot {path}: its metadata is damaged ({error}); use another one") from None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"snapshot {path}: format version is {version!r}, this sinkring reads {FORMAT_VERSION}; use the sinkring that wrote it"
        )
    if _sha256_of(data, metadata[_SHA256]) != metadata[_SHA256]:
        raise BundleError(f"snapshot {path}: its content is not what was written, sha256 differs; use another one")
    if not isinstance(record.get("identity"), str) or "stream" not in record:
        raise BundleError(f"snapshot {path}: its metadata lacks the identity or the stream; use another one")
    if record["identity"] != identity(manifest):
        raise BundleError(
            f"snapshot {path}: was taken from another bundle ({record['identity'][:12]}..., this one is {identity(manifest)[:12]}...): "
            "model, policy, rings and dtype must be the same"
        )
    _check_content(path, manifest, record["stream"], tensors)
    return record["stream"], tensors


def _check_content(path: Path, manifest: Manifest, stream: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Whoever can compute a sha256 can write anything: numbers that would index a buffer, and arrays that numpy would stretch to fit."""

    def require(good: bool, what: str) -> None:
        if not good:
            raise BundleError(f"snapshot {path}: {what}; it was not written by sinkring, use another one")

    vocab = manifest.model.vocab_size
    expected = {state.name: (tuple(_row_shape(manifest, state.name)), str(host_dtype(state.dtype))) for state in manifest.states}
    expected[LOGITS] = ((vocab,), "float32")
    for name, form in expected.items():
        found = tensors.get(name)
        require(found is not None, f"has no tensor {name!r}")
        assert found is not None, "checked in the line before"
        require((found.shape, str(found.dtype)) == form, f"{name} is {found.dtype} {found.shape}, this bundle's is {form[1]} {form[0]}")
    require(tensors.keys() == expected.keys(), "has tensors that this bundle does not know")
    counters = ("fed", "reached", "pending", "history", "logits_stand", "sampler")
    require(isinstance(stream, dict) and stream.keys() == set(counters), f"its record must have just {', '.join(counters)}")
    fed, reached = stream["fed"], stream["reached"]
    require(
        all(type(count) is int for count in (fed, reached)) and 0 <= fed <= reached <= manifest.position_limit, "its counters make no sense"
    )
    for name in ("pending", "history"):
        tokens = stream[name]
        least = NO_TOKEN if name == "history" and manifest.embedding is not None else 0
        sound = isinstance(tokens, list) and all(type(token) is int and least <= token < vocab for token in tokens)
        require(sound, f"{name} must be token ids in [0, {vocab})")
    require(isinstance(stream["logits_stand"], bool), "logits_stand must be true or false")
    sampler = stream["sampler"]
    require(sampler is None or (isinstance(sampler, dict) and sampler.keys() == {"options", "state"}), "its sampler must be null or whole")
    if sampler is not None:
        try:
            Sampler(SamplingOptions(**sampler["options"]), vocab).load_state(sampler["state"])
        except (InputError, TypeError, AttributeError) as error:
            require(False, f"its sampler makes no sense ({error})")


@contextmanager
def _put_in_place(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` to fill; on the disk and renamed to `path` when the block ends well, removed when it does not.

    Its name is always the same, so that writers that are killed leave at most one behind, which the next one takes.
    """
    beside = path.with_name(f".{path.name}.part")
    with _locked(beside) as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    # Make the new name durable, where the system can.
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open `path`, made if need be, for this process alone; the lock dies with the process. Raises InputError if another one has it."""
    while True:
        with path.open("ab") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise InputError(f"{path}: another process is writing this snapshot; give each its own path, or wait") from None
                except OSError:
                    pass  # a file system without locks
            # Between opening and locking, another writer may have renamed this very file to its place, or removed it.
            if _is_still_at(file, path):
                yield file
                return


def _is_still_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sha256_of(data: bytes, said: str) -> str:
    """sha256 of the file's bytes with its own, `said`, zeroed."""
    at = data.find(said.encode())
    digest = hashlib.sha256(data[:at])
    digest.update(_NO_SHA256.encode())
    digest.update(memoryview(data)[at + len(_NO_SHA256) :])
    return digest.hexdigest()


def _reason(error: OSError | ValueError) -> str:
    """A path with a NUL in it is a ValueError, all else that the system says of a path is an OSError."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _row_shape(manifest: Manifest, name: str) -> list[int]:
    (state,) = [state for state in manifest.states if state.name == name]
    return [1 if axis == state.batch_axis else size for axis, size in enumerate(state.shape)]


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise DependencyError("snapshots need the package safetensors: pip install 'sinkring[snapshots]'") from None
    return safetensors.numpy
