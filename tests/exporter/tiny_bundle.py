"""Bundles of a tiny random Llama, and ways of breaking them: a wrong bundle must look right to everything but the comparison of logits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sinkring.exporter.bundle_writer import describe_file
from sinkring.exporter.export import export_decoder
from sinkring.runtime.manifest import MANIFEST_NAME
from transformers import PreTrainedModel

from tests.models.tiny import tiny_llama


def export_tiny(folder: Path, model: PreTrainedModel | None = None, **options: Any) -> Path:
    """A bundle in `folder`/bundle of `model` (default: tiny_llama()), saved as `folder`/model. options are those of export_decoder."""
    (model or tiny_llama()).save_pretrained(folder / "model")
    export_decoder(folder / "model", folder / "bundle", **options)
    return folder / "bundle"


def shared_tiny(folders: pytest.TempPathFactory, **options: Any) -> Path:
    """export_tiny of the default model, made once for all test files: leave it as it is."""
    name = "-".join(str(options[key]) for key in sorted(options))
    folder = folders.getbasetemp() / "shared-tiny" / name
    return folder / "bundle" if folder.exists() else export_tiny(folder, **options)


def broken_copy(bundle: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the bundle whose manifest, as JSON, was changed."""
    shutil.copytree(bundle, out)
    raw = json.loads((out / MANIFEST_NAME).read_text(encoding="utf-8"))
    change(raw)
    (out / MANIFEST_NAME).write_text(json.dumps(raw), encoding="utf-8")
    return out


def accept_files(bundle: Path) -> None:
    """Make the manifest vouch for the files as they are now."""
    raw = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    for entry in raw["files"]:
        found = describe_file(bundle, entry["path"])
        entry["bytes"], entry["sha256"] = found.bytes, found.sha256
    (bundle / MANIFEST_NAME).write_text(json.dumps(raw), encoding="utf-8")
