"""Fixtures that several folders of tests share."""

import gc
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Two workers share the cores: torch's threads would only wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's examples take longest: begin with them, so that one worker runs them while the other does the rest."""
    items.sort(key=lambda item: "tests/readme/" not in item.nodeid)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector need not go through all of it, a second each time, whenever it is called."""
    gc.freeze()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in a copy of the tree: setuptools leaves a build folder whose files, once deleted, live on in later wheels."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("exporter", "runtime", "models"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


@dataclass(frozen=True)
class BareVenv:
    """An environment with numpy, onnxruntime and sinkring's wheel, and nothing else: what a machine that only runs bundles has."""

    python: Path

    def run(self, code: str, *arguments: str, timeout_seconds: float = 300) -> str:
        """What `code` prints, run with `arguments` as sys.argv[1:]. Fails the test, with its stderr, on a nonzero exit."""
        return run(str(self.python), "-c", code, *arguments, timeout_seconds=timeout_seconds)


@pytest.fixture(scope="session")
def bare_runtime_venv(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> BareVenv:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    bare = BareVenv(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    pip = [str(bare.python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    run(*pip, "--constraint", str(ROOT / "constraints.txt"), "numpy", "onnxruntime")
    run(*pip, "--no-deps", str(wheel))
    return bare


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama: 2 layers, D = 8, V = 97."""
    from tests.models.tiny import tiny_llama

    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Bundle of `tiny_model`, one row: S = 2, W = 4, chunk 4, and C = 16, so it wraps within 16 tokens. Read only: copy it to damage it."""
    return _export_tiny(tmp_path_factory, tiny_model, batch=1)


@pytest.fixture(scope="session")
def tiny_bundle_of_three(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """As `tiny_bundle`, with three rows."""
    return _export_tiny(tmp_path_factory, tiny_model, batch=3)


def _export_tiny(factory: pytest.TempPathFactory, model: Path, batch: int) -> Path:
    from sinkring.exporter.export import export_decoder

    out = factory.mktemp("tiny") / f"bundle{batch}"
    export_decoder(model, out, sinks=2, window=4, chunk=4, batch=batch)
    return out


def run(*command: str, timeout_seconds: float = 600) -> str:
    # Outside the repository, and without what would let the tree or this environment shine through.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_seconds, cwd=Path(command[0]).parent, env=environment, check=False
    )
    if result.returncode:
        pytest.fail(f"exit status {result.returncode} from {' '.join(command[:6])} ...\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return result.stdout


@pytest.fixture(scope="session")
def smollm2_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle of SmolLM2-135M-Instruct, streaming: S = 4, W = 64, chunk 32, and M = 100, so that 400 tokens see three wraps.

    For tests marked real_weights. Read only: copy its manifest to change anything.
    """
    from sinkring.exporter.export import export_decoder

    out = tmp_path_factory.mktemp("smollm2") / "bundle"
    export_decoder("smollm2", out, policy="streaming", sinks=4, window=64, chunk=32)
    return out
