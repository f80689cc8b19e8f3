"""What a user installs: the wheel holds the whole tree, and the runtime in it runs where there is no torch."""

import json
import subprocess
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from sinkring.runtime import open_bundle

from tests.conftest import BareVenv

ROOT = Path(__file__).parents[1]
FOLDERS = ("exporter", "runtime", "models")


@pytest.fixture(scope="module")
def packed(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_every_source_file(packed: dict[str, bytes]) -> None:
    """Both ways and byte for byte: a sub-package that `packages` forgets is left out without a word."""
    tree = {
        f"sinkring/{path.relative_to(ROOT).as_posix()}": path.read_bytes() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    wheel_sources = {name: content for name, content in packed.items() if name.endswith(".py")}
    assert sorted(wheel_sources) == sorted(tree)
    assert [name for name in tree if tree[name] != wheel_sources[name]] == []


def test_wheel_holds_everything_beside_the_sources(packed: dict[str, bytes]) -> None:
    """Data files too: whatever lies in the three folders and is no cache must be named under package-data."""
    tree = {f"sinkring/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert sorted(name for name in tree if "__pycache__" not in name and name not in packed) == []


def test_every_folder_of_sources_is_a_package() -> None:
    """Without __init__.py a folder is a namespace package, which mypy and setuptools each read in their own way."""
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()) == []


def test_packages_are_those_of_the_tree() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    tree = {".".join(["sinkring", *path.parent.relative_to(ROOT).parts]) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert sorted(named) == sorted(tree)


def test_wheel_is_typed_and_licensed(packed: dict[str, bytes]) -> None:
    for folder in FOLDERS:
        assert f"sinkring/{folder}/py.typed" in packed
    assert "sinkring/__init__.py" not in packed, "sinkring is a namespace: other packages may live in it"
    (text,) = [content for name, content in packed.items() if name.endswith(".dist-info/licenses/LICENSE")]
    assert text == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in text


def test_constraints_pin_every_package_that_is_asked_for() -> None:
    """A name in pyproject.toml without a pin would float; `tensorrt`, `gpu` and their like are not part of the tested set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    used = ("cpu", "cli", "plots", "metrics", "export", "tensorrt-rtx", "dev")
    asked = [*project["dependencies"], *(line for extra in used for line in extras[extra])]
    names = {line.partition(">=")[0] for line in asked if not line.startswith("sinkring[")}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert sorted(names - {name.lower() for name in pins}) == []
    assert "+" not in pins["torch"]
    assert {name: pin for name, pin in pins.items() if not pin[:1].isdigit()} == {}


def test_bare_runtime_has_no_torch(bare_runtime_venv: BareVenv) -> None:
    installed = bare_runtime_venv.run(
        "from importlib import metadata; print(*sorted(found.metadata['Name'].lower() for found in metadata.distributions()))"
    ).split()
    assert {"numpy", "onnxruntime", "sinkring"} <= set(installed)
    assert not {"torch", "transformers", "onnx"} & set(installed)


def test_runtime_imports_without_torch(bare_runtime_venv: BareVenv) -> None:
    modules = [
        ".".join(["sinkring", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for path in sorted((ROOT / "runtime").rglob("*.py"))
    ]
    printed = bare_runtime_venv.run(
        "import importlib, sys\n"
        "import sinkring.runtime\n"
        "print(sinkring.runtime.__file__)\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', 'onnx', 'onnxscript'}))",
        *modules,
    )
    where, heavy = printed.split("\n")[:2]
    assert "site-packages" in where, "the wheel is what must be imported, not the tree"
    assert heavy == ""


def test_importing_the_runtime_loads_no_backend(bare_runtime_venv: BareVenv) -> None:
    """A backend is loaded when a bundle is opened with it: an import must be quick, and work where another backend is the installed one."""
    loaded = bare_runtime_venv.run(
        "import sys, sinkring.runtime\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'onnxruntime', 'tensorrt', 'tensorrt_rtx', 'cuda'}))"
    )
    assert loaded.split() == []


def test_wheel_and_environment_have_one_version(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == metadata.version("sinkring")


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("exit 127", "found no working"),
        ("case $2 in *print*) echo 3.10.13 ;; *3,\\ 11*) exit 1 ;; esac", "is 3.10.13; install a newer one"),
        ("case $2 in *print*) echo 3.12.1 ;; *ensurepip*) exit 1 ;; esac", "(3.12.1) lacks the venv module"),
    ],
)
def test_setup_says_in_one_line_what_is_wrong_with_python(tmp_path: Path, python: str, says: str) -> None:
    """All three are found before anything is written. `python` is the body of a stand-in for the interpreter."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{python}\n", encoding="utf-8")
    stand_in.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(stand_in)}
    result = subprocess.run([ROOT / "scripts" / "setup"], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert says in line
    assert str(stand_in) in line


def test_the_bare_runtime_runs_a_bundle(bare_runtime_venv: BareVenv, tiny_bundle: Path) -> None:
    """With nothing but numpy and onnxruntime: the same tokens as here, past the end of the ring, and still no torch."""
    code = """
import json, sys
from sinkring.runtime import open_bundle
with open_bundle(sys.argv[1], threads=1) as decoder:
    stream = decoder.stream()
    stream.feed(range(1, 30))
    tokens = list(stream.generate(40))
print(json.dumps({"tokens": tokens, "position": stream.position, "torch": "torch" in sys.modules}))
"""
    with open_bundle(tiny_bundle, threads=1) as decoder:
        stream = decoder.stream()
        stream.feed(range(1, 30))
        here = list(stream.generate(40))
    assert json.loads(bare_runtime_venv.run(code, str(tiny_bundle))) == {"tokens": here, "position": 69, "torch": False}
