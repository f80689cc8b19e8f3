"""Memory taken since a moment lies in huge pages: nothing else does, nothing is filled, and contents and addresses stay."""

import mmap
from contextlib import closing
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from sinkring.runtime import open_bundle
from sinkring.runtime.backends import huge_pages
from sinkring.runtime.backends import onnxruntime as backend

PAGE = 2 << 20
SIZE = 16 * PAGE


def area() -> mmap.mmap:
    return mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def bytes_of(memory: mmap.mmap, what: str) -> int:
    """The sum of one line of /proc/self/smaps over the mappings that hold a part of this memory."""
    start = np.frombuffer(memory, np.uint8).ctypes.data
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        low, dash, high = first.partition("-")
        if dash and ":" not in low:
            inside = int(low, 16) < start + SIZE and int(high, 16) > start
        elif inside and first == f"{what}:":
            total += int(rest.split()[0]) * 1024
    return total


@pytest.fixture
def supported() -> None:
    if huge_pages._page_bytes() != PAGE or not huge_pages.mapped():
        pytest.skip("this system has no such pages")


@pytest.mark.usefixtures("supported")
def test_new_memory_is_moved_and_stays_what_it_is() -> None:
    before = huge_pages.mapped()
    # A neighbour that nobody uses: the kernel makes one mapping of the two.
    with closing(area()), closing(area()) as memory:
        array = np.frombuffer(memory, np.uint32)
        array[:] = np.arange(array.size)
        address = array.ctypes.data
        assert huge_pages.use_huge_pages(since=before) >= SIZE - 2 * PAGE
        assert array.ctypes.data == address
        assert (array == np.arange(array.size)).all()
        # The kernel may have none to give, but here it does: the memory is this test's alone.
        assert bytes_of(memory, "AnonHugePages") >= SIZE // 2
        del array


@pytest.mark.usefixtures("supported")
def test_memory_that_was_there_before_is_left_alone() -> None:
    with closing(area()) as memory:
        array = np.frombuffer(memory, np.uint8)
        array[:] = 1
        huge_pages.use_huge_pages(since=huge_pages.mapped())
        assert bytes_of(memory, "AnonHugePages") == 0
        del array


@pytest.mark.usefixtures("supported")
def test_what_is_hardly_used_is_not_filled() -> None:
    before = huge_pages.mapped()
    with closing(area()) as memory:
        array = np.frombuffer(memory, np.uint8)
        array[PAGE] = 1
        used = bytes_of(memory, "Rss")
        huge_pages.use_huge_pages(since=before)
        assert bytes_of(memory, "Rss") <= used + PAGE
        del array


@pytest.mark.usefixtures("supported")
def test_once_free_it_is_like_any_memory() -> None:
    if "[always]" in (huge_pages._SETTINGS / "enabled").read_text():
        pytest.skip("here one byte takes a huge page wherever it lies")
    before = huge_pages.mapped()
    with closing(area()) as memory:
        array = np.frombuffer(memory, np.uint8)
        array[:] = 1
        huge_pages.use_huge_pages(since=before)
        moved = bytes_of(memory, "AnonHugePages")
        # What malloc does with memory that it gives back and takes again.
        memory.madvise(mmap.MADV_DONTNEED)
        empty = bytes_of(memory, "Rss")
        array[5 * PAGE] = 1
        taken = bytes_of(memory, "Rss") - empty
        del array
    if not moved:
        pytest.skip("this system moves pages in its own time, and marks are all that can be done")
    assert taken <= mmap.PAGESIZE


@pytest.mark.parametrize(
    "settings", [{}, {"enabled": "always madvise [never]\n", "hpage_pmd_size": f"{PAGE}\n"}], ids=["no pages", "never"]
)
def test_where_there_are_none_nothing_is_done(settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in settings.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_pages.use_huge_pages(since=[]) == 0
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "maps")
    assert huge_pages.mapped() == []


@given(st.data())
def test_stretches_are_what_is_in_no_other(data: st.DataObject) -> None:
    def mapping() -> huge_pages.Stretch:
        start = data.draw(st.integers(0, 30))
        return huge_pages.Stretch(start, data.draw(st.integers(start + 1, 32)))

    whole, others = mapping(), [mapping() for _ in range(data.draw(st.integers(0, 4)))]
    places = [place for stretch in huge_pages._without(whole, others) for place in range(stretch.start, stretch.end)]
    assert places == [place for place in range(whole.start, whole.end) if not any(other.start <= place < other.end for other in others)]


def test_a_bundle_is_moved_once_it_is_whole(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(backend, "mapped", lambda: ["before"])
    monkeypatch.setattr(backend, "use_huge_pages", lambda since: asked.append(since))
    with open_bundle(tiny_bundle, threads=1) as decoder:
        assert asked == [["before"]]
        assert decoder.stream().feed([1, 2]) is not None
