"""Writing a bundle so that it is there whole or not at all."""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import FORMAT, MANIFEST_NAME, File


@contextmanager
def new_bundle(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` to fill; renamed to `out` when the block ends well, removed when it does not.

    An existing bundle at `out` is replaced only at that moment, and only with `overwrite`. What an export that was killed left there is
    cleared away first.
    Raises BundleError if `out` is something else than a bundle or an empty folder, or a bundle without `overwrite`.
    """
    # A link to a bundle keeps pointing to it: what is replaced is the folder.
    out = out.resolve()
    check_replaceable(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(out)
    # Which may have put an older bundle back.
    check_replaceable(out, overwrite)
    part = out.parent / f".{out.name}.{secrets.token_hex(4)}.part"
    part.mkdir()
    try:
        with locked(part):
            yield part
            _sync(part)
            with locked(out.parent):
                # Exporting takes minutes, in which something else may have come to stand there: another export's bundle, for one.
                check_replaceable(out, overwrite)
                _put_in_place(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Raises BundleError if `out` is there and neither a bundle nor an empty folder: nothing else is ever removed.

    Also for a bundle, if not `overwrite`.
    """
    if out.exists() and not out.is_dir():
        raise BundleError(f"{out}: is a file, not a folder; give another --out")
    if out.is_dir() and any(out.iterdir()) and not _is_bundle(out):
        raise BundleError(f"{out}: exists and is not a sinkring bundle; it is left alone, give another --out or remove it")
    if not overwrite and (out / MANIFEST_NAME).exists():
        raise BundleError(f"{out}: is already a bundle; give another --out, or --overwrite to replace it and the engines in it")


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


def _is_bundle(folder: Path) -> bool:
    manifest = folder / MANIFEST_NAME
    # By its mark: other programs, too, call a file manifest.json, and a bundle of another version may be replaced.
    return manifest.is_file() and f'"{FORMAT}"'.encode() in manifest.read_bytes()


def _put_in_place(part: Path, out: Path) -> None:
    old = part.with_suffix(".old")
    if _is_bundle(out):
        out.rename(old)
    try:
        part.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    _sync_entries(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    """Remove what killed exports left beside `out`, and put back a bundle that one had moved aside but not yet replaced."""
    name = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]+\.(part|old)")
    for left in sorted(path for path in out.parent.iterdir() if name.fullmatch(path.name)):
        part = left.with_suffix(".part")
        if part.is_dir() and not _abandoned(part):
            continue
        if left.suffix == ".old" and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` as this process's, waiting for whoever has it. The lock dies with the process; a process id would be used again."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Without locks, on a file system that has none, leftovers stay and two exports to one name take their chances.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _abandoned(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_entries(folder)


def _sync_entries(folder: Path) -> None:
    """Make names and renames in `folder` durable, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
