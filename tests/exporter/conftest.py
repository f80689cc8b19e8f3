"""What the tests of the command line share: one tiny model, exported once, by the command itself."""

from pathlib import Path

import pytest

from tests.exporter.invoke_cli import invoke
from tests.exporter.speaking_model import save_speaking_model


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: see `speaking_model.py`. Not to be written to."""
    folder = tmp_path_factory.mktemp("speaking")
    save_speaking_model(folder)
    return folder


@pytest.fixture(scope="session")
def speaking_bundle(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle exported from it: S=2, W=8, chunks of 4, so that a prompt of a few words wraps. Not to be written to."""
    out = tmp_path_factory.mktemp("exported") / "bundle"
    ended = invoke("export", speaking_model, "--out", out, "--sinks", 2, "--window", 8, "--chunk", 4)
    assert ended.status == 0, ended.err
    return out
