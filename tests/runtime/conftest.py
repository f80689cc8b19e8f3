"""A stream on the tiny bundle of one row."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sinkring.runtime import Decoder, Stream, open_bundle


@pytest.fixture(scope="module")
def decoder(tiny_bundle: Path) -> Iterator[Decoder]:
    with open_bundle(tiny_bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def stream(decoder: Decoder) -> Iterator[Stream]:
    with decoder.stream() as taken:
        yield taken
