"""Who may import whom, and what the text of the project must not carry: read from the source, so that a lazy import counts too."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("exporter", "runtime", "models")

FORBIDDEN = {
    "runtime": ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "sinkring.exporter", "sinkring.models"),
    "models": ("sinkring.exporter", "sinkring.runtime"),
    "exporter": (),
}

# Loads a second copy of a module beside sinkring's: works only where the repository root happens to be on sys.path.
BARE = tuple(FOLDERS)


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a module in `package`; `from a import b` names both a and a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, node.args[0].value


def broken_rules(source: str, package: str, forbidden: tuple[str, ...]) -> list[str]:
    return sorted(
        {
            f"line {line}: {name}"
            for line, name in imports(ast.parse(source), package)
            if any(name == banned or name.startswith(banned + ".") for banned in forbidden)
        }
    )


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_their_direction(path: Path) -> None:
    folder, *inner = path.relative_to(ROOT).parent.parts
    package = ".".join(["sinkring", folder, *inner])
    assert broken_rules(path.read_text(encoding="utf-8"), package, FORBIDDEN[folder]) == []


@pytest.mark.parametrize("path", python_files(*FOLDERS, "tests", "scripts"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_three_folders_are_imported_as_sinkring(path: Path) -> None:
    assert broken_rules(path.read_text(encoding="utf-8"), "sinkring", BARE) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch", "line 1: torch"),
        ("def f():\n    import torch.nn as nn", "line 2: torch.nn"),
        ("from torch import nn", "line 1: torch"),
        ("from ..exporter import cli", "line 1: sinkring.exporter"),
        ("from sinkring import models", "line 1: sinkring.models"),
        ("import importlib\nimportlib.import_module('onnx')", "line 2: onnx"),
        ("__import__('transformers')", "line 1: transformers"),
    ],
)
def test_the_scan_sees_each_way_to_import(source: str, found: str) -> None:
    assert found in broken_rules(source, "sinkring.runtime", FORBIDDEN["runtime"])


@pytest.mark.parametrize(
    "source",
    ["import onnxruntime", "from .ring import RingGeometry", "from sinkring.runtime import ring", "from .backends import onnx", "'torch'"],
)
def test_the_scan_lets_the_rest_pass(source: str) -> None:
    assert broken_rules(source, "sinkring.runtime", FORBIDDEN["runtime"]) == []


# A home, scratch or checkout folder of some machine. An interpreter's path in a script's first line is none of these.
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:root|home|work|tmp|mnt|opt|Users)/\w|\b[A-Z]:\\\\?Users\b|\bfile:///\w")


def text_files() -> list[Path]:
    """What a reader of the project sees: everything but caches, environments and outputs, all of which start with a dot or are ignored."""
    kept = {".py", ".md", ".toml", ".txt", ".yaml", ".json", ".cff", ""}
    top = [path for path in ROOT.iterdir() if path.is_file() and not path.is_symlink()]
    inside = [path for folder in (*FOLDERS, "tests", "scripts", "docs", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in [*top, *inside] if path.suffix in kept and "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", text_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_text_names_no_machine(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if MACHINE_PATH.search(line)] == []


@pytest.mark.parametrize("text", ["see /" + "home/me/models", "open('/" + "tmp/x')", "C:" + "\\Users", "file://" + "/srv"])
def test_machine_paths_are_recognized(text: str) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["#!/usr/bin/env bash", "/path/to/python3", "tests/tmp/x", "$HOME/tmp/x", "src/home/x"])
def test_other_paths_are_not(text: str) -> None:
    assert not MACHINE_PATH.search(text)
