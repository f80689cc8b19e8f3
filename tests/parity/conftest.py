"""Each tiny bundle is exported once per session, when a test first asks for it."""

from collections.abc import Callable, Iterator

import pytest

from tests.parity.tiny_bundles import TinyBundle, export_tiny


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
