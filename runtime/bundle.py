"""Is a bundle what its manifest says?"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import DTYPE_BYTES, MANIFEST_NAME, WEIGHTS_NAME, Manifest

# What file systems take for one name, and well below what they take for a whole path.
_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 1024
_LONGEST_SHOWN = 80


def check_consistent(bundle: Path, manifest: Manifest) -> None:
    """Do the manifest's own numbers fit together? Reads no file. Raises BundleError for the first that does not.

    The manifest is the one file that nothing hashes, and a wrong number in it would write the wrong slot without an error.
    """
    where = bundle / MANIFEST_NAME

    def fail(what: str, found: object, expected: object) -> BundleError:
        return BundleError(f"{where}: {what} is {found}, expected {expected}; the bundle is damaged, export again")

    named = list(_named_paths(manifest))
    for what, path in (*(("files", file.path) for file in manifest.files), *named):
        if not _is_inside(path):
            raise fail(f"{what}: path", repr(path[:_LONGEST_SHOWN]), "a path inside the bundle")
    for _, path in named:
        manifest.file(path)
    if manifest.batch < 1 or manifest.chunk < 1:
        raise fail("batch, chunk", (manifest.batch, manifest.chunk), "1 or more")
    if (embedding := manifest.embedding) is not None:
        books = embedding.codebooks
        last = manifest.model.vocab_size if books is None else max(books.first + books.count * books.size, books.silence + 1)
        if embedding.rows < max(last, manifest.model.vocab_size):
            raise fail("embedding: rows", embedding.rows, f"{max(last, manifest.model.vocab_size)} or more")
        if books is not None and min(books.count, books.size, books.first, books.silence + 1) < 1:
            raise fail("embedding: codebooks", books, "counts of 1 or more")
        if embedding.hidden_size != manifest.model.hidden_size:
            raise fail("embedding: hidden_size", embedding.hidden_size, f"the model's, {manifest.model.hidden_size}")
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


def _named_paths(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Every path that the manifest names, and where; each must be among its files."""
    yield "weights", WEIGHTS_NAME
    for graph in manifest.graphs:
        yield "graphs", graph.path
        yield "graphs: widened", graph.cpu_path
    for engine in manifest.engines:
        yield "engines", engine.path
        yield "engines: report", engine.report
        yield "engines: graph", engine.graph_path
    if manifest.embedding is not None:
        yield "embedding", manifest.embedding.table
    if manifest.tokenizer is not None:
        yield "tokenizer", manifest.tokenizer.tokenizer
        if manifest.tokenizer.chat_template is not None:
            yield "tokenizer: chat_template", manifest.tokenizer.chat_template


def _is_inside(path: str) -> bool:
    """Whether a path, read from the bundle's folder, can be a file in it; by its letters alone."""
    parts = Path(path).parts
    try:
        length, lengths = len(os.fsencode(path)), [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:  # lone surrogates, which JSON can hold and no name can
        return False
    return (
        bool(parts)
        and not Path(path).is_absolute()
        and ".." not in parts
        and "\0" not in path
        and max(lengths) <= _LONGEST_NAME_BYTES
        and length <= _LONGEST_PATH_BYTES
    )


def check_files(bundle: Path, manifest: Manifest, hashes: bool = True) -> None:
    """Compare every listed file's size, and with `hashes` its sha256, with the manifest. Raises BundleError for the first that differs."""
    for file in manifest.files:
        path = bundle / file.path
        if not path.is_file():
            raise BundleError(f"{path}: is listed in the manifest but missing; export again")
        # ONNX Runtime refuses such weights, in words of its own; and what a link leads to may change when no one thinks of the bundle.
        if not path.resolve().is_relative_to(bundle.resolve()):
            raise BundleError(f"{path}: is a link out of the bundle; copy the file into it, or export again")
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
