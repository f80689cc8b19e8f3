"""The README is run: every fenced command and every Python example, in its order, by the shell a reader would use.

The commands stand on each other (the first one makes bundles/smollm2), so they are one module with one order; a failure stops the rest.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# Running the tests from within the tests would not end. That the command works is shown by the run that this test is part of.
SELF = "scripts/test"
FOLDERS = ("exporter", "runtime", "models", "scripts")


@dataclass(frozen=True)
class Example:
    """One command line, or one Python block. number: its place in the README."""

    number: int
    language: str
    text: str

    @property
    def title(self) -> str:
        return f"{self.number}: {self.text.strip().splitlines()[0][:70]}"


def examples() -> list[Example]:
    found: list[tuple[str, str]] = []
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if language == "bash":
            found += [("bash", line) for line in body.splitlines() if line.strip() and not line.startswith("#")]
        else:
            found.append((language, body))
    return [Example(number, language, text) for number, (language, text) in enumerate(found, 1)]


EXAMPLES = examples()
_failed: list[str] = []
# What the examples export themselves: an existing bundle is never replaced unasked.
MADE_BY_EXAMPLES = ("bundles/native", "bundles/api")


@pytest.fixture(scope="module", autouse=True)
def fresh_bundles() -> None:
    for bundle in MADE_BY_EXAMPLES:
        shutil.rmtree(ROOT / bundle, ignore_errors=True)


@pytest.mark.real_weights
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_an_example_runs(example: Example) -> None:
    if _failed:
        pytest.fail(f"not run: it may stand on an example that failed before, {_failed[0]!r}")
    if example.text == SELF:
        assert os.access(ROOT / SELF, os.X_OK), f"{SELF} must be there and executable"
        return
    environment = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", example.text] if example.language == "bash" else [sys.executable, "-c", example.text]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    if done.returncode:
        _failed.append(example.title)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr


def test_no_fence_is_passed_over() -> None:
    openings = re.findall(r"^```(.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)[::2]
    assert set(openings) == {"bash", "python"}, "a fence of another language would not be run"


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_file_has_its_line(folder: str) -> None:
    text = README.read_text(encoding="utf-8")
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = [path.relative_to(ROOT).as_posix() for path in files if path.name not in ("__init__.py", "py.typed")]
    missing = [name for name in sorted(names) if f"`{name}`" not in text]
    assert not missing, f"not described under 'One line per file': {missing}"
    gone = [name for name in re.findall(rf"^\| `({folder}/[^`]+)` \|", text, re.MULTILINE) if not (ROOT / name).exists()]
    assert not gone, f"described but not there: {gone}"
