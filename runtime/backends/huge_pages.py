"""Memory that was taken since a moment, moved to huge pages (Linux).

A step reads every byte of the weights and the rings once, and with pages of 4 KB it waits for the address of each: on a virtual machine
that is up to a quarter of a step. ONNX Runtime's packed weights are taken with malloc, so pages can only be exchanged once they are
there.
"""

import ctypes
import itertools
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAPS = Path("/proc/self/maps")
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# Of linux/mman.h, since Linux 6.1: exchange the pages now. Before it, or where it is refused, the addresses are marked and the kernel does
# so in its own time. Only then: a mark outlives the bundle, and whatever little lies there afterwards takes up a huge page.
_MADV_COLLAPSE = 25
# What is mapped but not used, as most of a thread's stack, must not be filled.
_USED = 0.9
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?")


@dataclass(frozen=True)
class Stretch:
    """Addresses, the end left out."""

    start: int
    end: int


def mapped() -> list[Stretch]:
    """What writable memory, of no file, the process has by now; nothing where the system doesn't say."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [Stretch(int(found[1], 16), int(found[2], 16)) for found in map(_MAPPING.fullmatch, lines) if found]


def use_huge_pages(since: list[Stretch]) -> int:
    """Move memory that is not in `since` to huge pages, as far as the system gives them. Returns how many bytes were asked for.

    Contents and addresses stay as they are, and nothing depends on it but time. What is smaller than one page, or hardly used, is left
    alone.
    """
    page = _page_bytes()
    if page is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    asked = 0
    for mapping in mapped():
        for stretch in _without(mapping, since):
            for start, end in _used(library, stretch, page):
                if library.madvise(start, end - start, _MADV_COLLAPSE) == 0:
                    asked += end - start
                else:
                    asked += sum(_move(library, at, page) for at in range(start, end, page))
    return asked


def _move(library: ctypes.CDLL, start: int, page: int) -> int:
    """One page: how many bytes were moved or marked."""
    if library.madvise(start, page, _MADV_COLLAPSE) == 0 or library.madvise(start, page, mmap.MADV_HUGEPAGE) == 0:
        return page
    return 0


def _page_bytes() -> int | None:
    """The size of a huge page, None where there are none or where the system's owner wants none."""
    try:
        wanted = "[never]" not in (_SETTINGS / "enabled").read_text(encoding="ascii")
        return int((_SETTINGS / "hpage_pmd_size").read_text(encoding="ascii")) if wanted else None
    except (OSError, ValueError):
        return None


def _without(mapping: Stretch, others: list[Stretch]) -> Iterator[Stretch]:
    """What of a mapping is in none of the others: the kernel makes one of neighbours."""
    start = mapping.start
    for other in sorted(others, key=lambda known: known.start):
        if other.end <= start or other.start >= mapping.end:
            continue
        if other.start > start:
            yield Stretch(start, other.start)
        start = max(start, other.end)
    if start < mapping.end:
        yield Stretch(start, mapping.end)


def _used(library: ctypes.CDLL, stretch: Stretch, page: int) -> Iterator[tuple[int, int]]:
    """The runs of whole huge pages' places in a stretch that are in memory nearly whole already: from where to where."""
    first = -(-stretch.start // page) * page
    count = (stretch.end - first) // page
    if count <= 0:
        return
    small = page // mmap.PAGESIZE
    held = np.empty((count, small), np.uint8)
    if library.mincore(first, count * page, held.ctypes.data) != 0:
        return
    # The lowest bit of each byte says whether the page is there, the others are not defined.
    use = ((held & 1).mean(axis=1) >= _USED).tolist()
    for is_used, places in itertools.groupby(range(count), key=use.__getitem__):
        if is_used:
            run = list(places)
            yield first + run[0] * page, first + (run[-1] + 1) * page
