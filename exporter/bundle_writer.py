"""Writing a bundle so that it is there whole or not at all."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import MANIFEST_NAME, File


@contextmanager
def new_bundle(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill; renamed to `out` when the block ends well, removed when it does not.

    An existing bundle at `out` is replaced only at that moment. Raises BundleError if `out` is neither a bundle nor an empty folder.
    """
    if out.exists() and not out.is_dir():
        raise BundleError(f"{out}: is a file, not a folder; give another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST_NAME).is_file():
        raise BundleError(f"{out}: exists and is not a sinkring bundle; it is left alone, give another --out or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    part = out.parent / f".{out.name}.{os.getpid()}.part"
    part.mkdir()
    try:
        yield part
        _sync(part)
        if out.exists():
            old = out.parent / f".{out.name}.{os.getpid()}.old"
            out.rename(old)
            part.rename(out)
            shutil.rmtree(old)
        else:
            part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def describe_file(bundle: Path, path: str) -> File:
    return File(path=path, bytes=(bundle / path).stat().st_size, sha256=sha256_of(bundle / path))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Write `path` so that a reader sees the old text or the new, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _sweep(out: Path) -> None:
    """Remove what an export that was killed left beside `out`, unless its process still runs."""
    for left in out.parent.glob(f".{out.name}.*.part"):
        owner = left.name.split(".")[-2]
        if left.is_dir() and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
