"""Fixtures that several folders of tests share."""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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


def run(*command: str, timeout_seconds: float = 600) -> str:
    # Outside the repository, and without what would let the tree or this environment shine through.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_seconds, cwd=Path(command[0]).parent, env=environment, check=False
    )
    if result.returncode:
        pytest.fail(f"exit status {result.returncode} from {' '.join(command[:6])} ...\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return result.stdout
