"""Each tiny bundle is exported once per session, when a test first asks for it."""

from collections.abc import Callable, Iterator
from functools import cache
from unittest import mock

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests.parity.tiny_bundles import TinyBundle, export_tiny


@pytest.fixture(scope="session", autouse=True)
def one_table_of_operators() -> Iterator[None]:
    """torch's exporter makes its table of operators anew for each trace, which is a good part of the time that a tiny model takes."""
    with mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib))):
        yield


@pytest.fixture(scope="session")
def parity_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], TinyBundle]]:
    """Call it with a name from EXPORTS."""
    made: dict[str, TinyBundle] = {}

    def get(name: str) -> TinyBundle:
        if name not in made:
            made[name] = export_tiny(name, tmp_path_factory.mktemp("tiny"))
        return made[name]

    yield get
    for bundle in made.values():
        bundle.close()
