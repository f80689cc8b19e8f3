"""Is a bundle what its manifest says?"""

import hashlib
from pathlib import Path

from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import DTYPE_BYTES, MANIFEST_NAME, WEIGHTS_NAME, Manifest


def check_consistent(bundle: Path, manifest: Manifest) -> None:
    """Do the manifest's own numbers fit together? Reads no file. Raises BundleError for the first that does not.

    The manifest is the one file that nothing hashes, and a wrong number in it would write the wrong slot without an error.
    """
    where = bundle / MANIFEST_NAME

    def fail(what: str, found: object, expected: object) -> BundleError:
        return BundleError(f"{where}: {what} is {found}, expected {expected}; the bundle is damaged, export again")

    if manifest.batch < 1 or manifest.chunk < 1:
        raise fail("batch, chunk", (manifest.batch, manifest.chunk), "1 or more")
    for ring in manifest.rings:
        longest = ring.geometry.longest_chunk
        if manifest.chunk > longest:
            reason = f"one more than the slack of {ring.write_index}" if ring.geometry.wraps else f"the capacity of {ring.write_index}"
            raise fail("chunk", manifest.chunk, f"at most {longest}, {reason}")
    for state in manifest.states:
        if state.dtype not in DTYPE_BYTES:
            raise fail(f"{state.name}: dtype", repr(state.dtype), f"one of {', '.join(DTYPE_BYTES)}")
        if not 0 <= state.batch_axis < len(state.shape):
            raise fail(f"{state.name}: batch_axis", state.batch_axis, f"an axis of {state.shape}")
        if state.shape[state.batch_axis] != manifest.batch:
            raise fail(f"{state.name}: rows", state.shape[state.batch_axis], f"batch, {manifest.batch}")
        if state.kind in ("ring", "linear"):
            if state.ring is None or not 0 <= state.ring < len(manifest.rings):
                raise fail(f"{state.name}: ring", state.ring, f"one of the {len(manifest.rings)} rings")
            geometry = manifest.rings[state.ring].geometry
            if state.shape[-2:-1] != (geometry.capacity,):
                raise fail(f"{state.name}: slots", state.shape[-2:-1], f"those of its ring, {geometry.capacity}")
            if (state.kind == "ring") != geometry.wraps:
                raise fail(f"{state.name}: kind", repr(state.kind), f"that of its ring, whose geometry has wraps={geometry.wraps}")
    tokenizer = manifest.tokenizer
    named = [WEIGHTS_NAME, *(graph.path for graph in manifest.graphs)]
    if tokenizer is not None:
        named += [path for path in (tokenizer.tokenizer, tokenizer.chat_template) if path is not None]
    for path in named:
        manifest.file(path)
    for file in manifest.files:
        if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
            raise fail("files: path", repr(file.path), "a path inside the bundle")


def check_files(bundle: Path, manifest: Manifest, hashes: bool = True) -> None:
    """Compare every listed file's size, and with `hashes` its sha256, with the manifest. Raises BundleError for the first that differs."""
    for file in manifest.files:
        path = bundle / file.path
        if not path.is_file():
            raise BundleError(f"{path}: is listed in the manifest but missing; export again")
        size = path.stat().st_size
        if size != file.bytes:
            raise BundleError(f"{path}: has {size} bytes, the manifest says {file.bytes}; the bundle is damaged, export again")
        if hashes:
            with path.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != file.sha256:
                raise BundleError(
                    f"{path}: sha256 is {found[:12]}..., the manifest says {file.sha256[:12]}...; the bundle is damaged, export again"
                )
