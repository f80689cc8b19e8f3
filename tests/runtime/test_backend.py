"""The ONNX Runtime backend: state in place, rows by themselves, buffers that stay."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from sinkring.runtime import Decoder, open_bundle
from sinkring.runtime.backends import Backend

V = 97


@pytest.fixture
def decoder(tiny_bundle_of_three: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle_of_three, threads=1) as opened:
        yield opened


@pytest.fixture
def backend(decoder: Decoder) -> Backend:
    return decoder.backend


def test_every_state_starts_at_its_initial_value(backend: Backend, decoder: Decoder) -> None:
    for row in range(3):
        held = backend.read_row(row)
        assert held.keys() == {state.name for state in decoder.manifest.states}
        for state in decoder.manifest.states:
            assert (held[state.name].shape, held[state.name].dtype) == ((1, *state.shape[1:]), np.float32)
            assert (held[state.name] == state.initial).all()


def test_read_row_copies_and_write_row_restores(backend: Backend) -> None:
    backend.prefill(1, np.arange(4), 0, (0,), 1)
    kept = backend.read_row(1)
    before = {name: row.copy() for name, row in kept.items()}
    expected = backend.prefill(1, np.array([9]), 4, (4,), 1).copy()
    assert all((kept[name] == before[name]).all() for name in kept), "read_row gave a view"
    backend.write_row(1, kept)
    np.testing.assert_array_equal(backend.prefill(1, np.array([9]), 4, (4,), 1), expected)
    assert all((row == 0).all() for other in (0, 2) for row in backend.read_row(other).values())


def test_reset_row_clears_poison_in_that_row_alone(backend: Backend) -> None:
    for row in range(3):
        backend.write_row(row, {name: np.full_like(old, np.nan) for name, old in backend.read_row(row).items()})
    backend.reset_row(1)
    assert [all(np.isnan(old).all() for old in backend.read_row(row).values()) for row in range(3)] == [True, False, True]
    assert all((old == 0).all() for old in backend.read_row(1).values())


def test_a_step_writes_one_slot_at_the_same_address(backend: Backend) -> None:
    before, addresses = backend.read_row(2), backend.addresses()
    backend.prefill(2, np.array([7]), 0, (5,), 1)
    for name, row in backend.read_row(2).items():
        changed = (row != before[name]).any(axis=(0, 1, 3))
        assert changed.nonzero()[0].tolist() == [5], name
    assert backend.addresses() == addresses


def test_decode_steps_all_rows(backend: Backend) -> None:
    """Each row at its own position: what `decode` gives them is what `prefill` gives one alone."""
    lengths = (1, 6, 21)
    ids = np.random.default_rng(0).integers(0, V, (3, 22))
    expected = []
    for row, length in enumerate(lengths):
        for at in range(length):
            backend.prefill(row, ids[row, at : at + 1], at, (_slot(at),), 1)
        kept = backend.read_row(row)
        expected.append(backend.prefill(row, ids[row, length : length + 1], length, (_slot(length),), 1)[0].copy())
        backend.write_row(row, kept)
    backend.input[:, 0] = [ids[row, length] for row, length in enumerate(lengths)]
    backend.position[:] = lengths
    backend.write_index[0][:] = [_slot(length) for length in lengths]
    backend.decode()
    assert backend.logits.shape == (3, 1, V)
    np.testing.assert_allclose(backend.logits[:, 0], expected, atol=1e-4, rtol=0)
    assert np.ptp(expected) > 1


def _slot(position: int) -> int:
    return position if position < 2 else 2 + (position - 2) % 14


def test_all_logits_or_the_last(backend: Backend) -> None:
    every = backend.prefill(0, np.arange(4), 0, (0,), 4).copy()
    backend.reset_row(0)
    last = backend.prefill(0, np.arange(4), 0, (0,), 1)
    assert (every.shape, last.shape) == ((4, V), (1, V))
    # One row or four: the product with the head sums in another order.
    np.testing.assert_allclose(every[-1], last[0], atol=1e-4, rtol=0)


def test_closing_gives_the_caches_back(decoder: Decoder) -> None:
    decoder.close()
    assert decoder.backend.addresses() == {}
    decoder.close()


IN_PLACE = """
import sys
from sinkring.runtime.backends import onnxruntime as backend
from sinkring.runtime import open_bundle

backend._ERRORS_ONLY = 2  # ONNX Runtime's own default: warnings, too
copied = "copied" in sys.argv
if copied:
    bind = backend._bind_state

    def bind_elsewhere(binding, state, array, in_place):
        bind(binding, state, array, False)
        spare.append(array.copy())
        backend._bind_output(binding, state.updated, spare[-1])

    spare = []
    backend._bind_state = bind_elsewhere
with open_bundle(sys.argv[1], threads=1, target=sys.argv[2]) as decoder:
    stream = decoder.stream()
    stream.feed([1, 2, 3, 4, 5, 6, 7])
    for token in range(20):
        stream.feed([token])
"""


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt-rtx"])
def test_onnxruntime_itself_sees_no_copy(tiny_bundle: Path, target: str) -> None:
    """At its default verbosity it warns of every cache that it has to copy: not once here, and for sure when input and output differ."""
    quiet, loud = (
        subprocess.run([sys.executable, "-c", IN_PLACE, str(tiny_bundle), target, *extra], capture_output=True, text=True, check=True)
        for extra in ([], ["copied"])
    )
    assert quiet.stderr == ""
    assert "past_cache" in loud.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_closing_gives_freed_memory_back(tiny_bundle: Path) -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes, library.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    size, process = 64 << 10, psutil.Process()
    decoder = open_bundle(tiny_bundle, threads=1)
    blocks = [library.malloc(size) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    # The last one stays, so that what is free is not at the end, where glibc gives it back by itself.
    for block in blocks[:-1]:
        library.free(block)
    held = process.memory_info().rss
    decoder.close()
    assert process.memory_info().rss < held - 1000 * size
    library.free(blocks[-1])
