"""`Stream.extend`: what the device picks and feeds back by itself is what `generate` yields, and other rows notice nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.runtime import open_bundle
from sinkring.runtime.backends.token_loop import LOOP_STEPS
from sinkring.runtime.errors import InputError, NumericalError

from tests.runtime.cuda_double import CudaDouble
from tests.runtime.engine_case import install_doubles, with_engines
from tests.runtime.tensorrt_double import TensorRtDouble

IDS = np.random.default_rng(0).integers(0, 97, 40)
TOKENS = 2 * LOOP_STEPS + 4  # two blocks, and 3 steps one by one


@pytest.fixture(scope="module")
def bundle(tiny_bundle_of_three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(tiny_bundle_of_three, tmp_path_factory.mktemp("engines") / "picks", next_token=True)


@pytest.fixture
def cuda() -> CudaDouble:
    return CudaDouble()


@pytest.fixture
def trt(cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> TensorRtDouble:
    return install_doubles(monkeypatch, cuda)


@pytest.fixture(scope="module")
def sampling_bundle(tiny_bundle_of_three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(tiny_bundle_of_three, tmp_path_factory.mktemp("engines") / "samples", sample_top_k=12)


def run(bundle: Path, extends: bool, sampling: dict[str, Any] | None = None, **options: Any) -> tuple[list[int], np.ndarray, int]:
    """The tokens of two turns, past several wraps of C = 16; the logits after a last fed token; the position."""
    with open_bundle(bundle, **options) as decoder:
        other, stream = decoder.stream(), decoder.stream()
        other.feed(IDS[20:33])
        before = decoder.backend.read_row(other.row)
        stream.feed(IDS[:7])
        ids: list[int] = []
        sampling = sampling or {}
        for count in (TOKENS, 1, 5):
            ids += stream.extend(count, **sampling).tolist() if extends else stream.generate(count, **sampling, stop_ids=())
            if count == 1:
                stream.feed(IDS[7:9])
        assert all((held == before[name]).all() for name, held in decoder.backend.read_row(other.row).items())
        return ids, stream.feed([1]), stream.position


def test_extend_is_generate_without_the_host(bundle: Path, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    ids, logits, position = run(bundle, extends=False, target="tensorrt-rtx", threads=1)
    assert len(set(ids)) > 5
    for options in ({"backend": "tensorrt-rtx"}, {"backend": "tensorrt-rtx", "cuda_graph": False}, {"threads": 1}):
        got = run(bundle, extends=True, **options)
        assert (got[0], got[2]) == (ids, position)
        np.testing.assert_allclose(got[1], logits, atol=1e-4, rtol=0)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 12, "seed": 3},
    {"temperature": 2.5, "top_k": 5, "seed": 4},
    {"temperature": 0.9, "top_k": 1, "seed": 5},
    {},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampled_on_the_device_is_sampled_on_the_host(
    sampling_bundle: Path, trt: TensorRtDouble, cuda: CudaDouble, sampling: dict[str, Any]
) -> None:
    ids, logits, position = run(sampling_bundle, False, sampling, target="tensorrt-rtx", threads=1)
    assert len(set(ids)) > 5
    for options in ({"backend": "tensorrt-rtx"}, {"backend": "tensorrt-rtx", "cuda_graph": False}, {"threads": 1}):
        got = run(sampling_bundle, True, sampling, **options)
        assert (got[0], got[2]) == (ids, position)
        np.testing.assert_allclose(got[1], logits, atol=1e-4, rtol=0)


def test_sampling_launches_blocks_and_another_seed_gives_other_tokens(sampling_bundle: Path, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    with open_bundle(sampling_bundle, "tensorrt-rtx") as decoder, decoder.stream() as stream:
        drawn = []
        for seed in (1, 1, 2):
            stream.reset()
            stream.feed(IDS[:7])
            cuda.calls.clear()
            drawn.append(stream.extend(TOKENS, temperature=1.5, top_k=12, seed=seed).tolist())
            assert cuda.calls == ["cudaGraphLaunch", "cudaStreamSynchronize"] * (2 + 3) + ["cudaMemcpyAsync", "cudaStreamSynchronize"]
        assert drawn[0] == drawn[1] != drawn[2]
        # More candidates than the head was built for are drawn from on the host.
        cuda.calls.clear()
        stream.extend(4, temperature=1.5, top_k=13, seed=1)
        assert "cudaGraphLaunch" not in cuda.calls


def test_a_snapshot_between_sampled_turns_goes_on_on_another_backend(sampling_bundle: Path, trt: TensorRtDouble, tmp_path: Path) -> None:
    sampling = SAMPLINGS[0]
    with open_bundle(sampling_bundle, "tensorrt-rtx") as decoder, decoder.stream() as stream:
        stream.feed(IDS[:7])
        stream.extend(20, **sampling)
        stream.snapshot(tmp_path / "stream")
        expected = stream.extend(20, **sampling).tolist()
    with open_bundle(sampling_bundle, target="tensorrt-rtx", threads=1) as decoder:
        assert list(decoder.restore(tmp_path / "stream").generate(20, **sampling, stop_ids=())) == expected


def test_one_launch_for_a_block_and_logits_only_at_its_end(bundle: Path, trt: TensorRtDouble, cuda: CudaDouble) -> None:
    with open_bundle(bundle, "tensorrt-rtx") as decoder:
        assert trt.events == ["run prefill", "run decode"] + ["capture decode"] * (1 + LOOP_STEPS + 1)
        stream = decoder.stream()
        stream.feed(IDS[:7])
        cuda.calls.clear()
        stream.extend(TOKENS)
        wait = ["cudaGraphLaunch", "cudaStreamSynchronize"]
        assert cuda.calls == wait * (2 + 3) + ["cudaMemcpyAsync", "cudaStreamSynchronize"]
        assert stream.position == 7 + TOKENS
        stream.rollback(1)
        again = stream.extend(1)
        assert again.shape == (1,)


def test_without_a_way_to_pick_it_is_generate(tiny_bundle: Path, tmp_path: Path, trt: TensorRtDouble) -> None:
    plain = with_engines(tiny_bundle, tmp_path / "plain")
    with open_bundle(plain, "tensorrt-rtx") as decoder, decoder.stream() as stream:
        assert trt.events.count("capture decode") == 1
        stream.feed(IDS[:7])
        first = stream.extend(6)
        stream.reset()
        stream.feed(IDS[:7])
        assert first.tolist() == list(stream.generate(6, stop_ids=()))


def test_what_makes_no_sense_is_refused(bundle: Path, trt: TensorRtDouble) -> None:
    with open_bundle(bundle, "tensorrt-rtx") as decoder:
        stream = decoder.stream()
        with pytest.raises(InputError, match="extend: the stream is empty"):
            stream.extend(3)
        stream.feed(IDS[:7])
        for wrong in (-1, 1.5, True):
            with pytest.raises(InputError, match=r"extend: tokens=.*: must be a whole number, 0 or more"):
                stream.extend(wrong)  # type: ignore[arg-type]
        assert stream.extend(0).tolist() == []
        poison = {name: np.full_like(held, np.nan) for name, held in decoder.backend.read_row(stream.row).items()}
        decoder.backend.write_row(stream.row, poison)
        with pytest.raises(NumericalError, match="the logits at position 9 are not finite: the stream is stopped"):
            stream.extend(3)
