"""A copy of a bundle with one thing changed, whose manifest vouches for the change. Large files are linked, not copied."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import numpy_helper
from sinkring.exporter.bundle_writer import describe_file
from sinkring.runtime.manifest import MANIFEST_NAME, Manifest


def copy_bundle(bundle: Path, manifest: Manifest, out: Path) -> None:
    """The manifest and the files that it lists, into the new folder `out`; engines are left out."""
    for path in (MANIFEST_NAME, *(file.path for file in manifest.files)):
        copy = out / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(bundle / path, copy)
        except OSError:  # another file system, or one without links
            shutil.copyfile(bundle / path, copy)


def edit_manifest(bundle: Path, change: Callable[[Manifest], Manifest]) -> None:
    text = change(Manifest.read(bundle)).to_json()
    _replace(bundle / MANIFEST_NAME, text.encode("utf-8"))


def edit_graph(bundle: Path, path: str, change: Callable[[onnx.ModelProto], None]) -> None:
    """Change one graph of the copy, its large weights left where they lie."""
    model = onnx.load(bundle / path, load_external_data=False)
    change(model)
    _replace(bundle / path, model.SerializeToString())
    described = describe_file(bundle, path)

    def vouch(manifest: Manifest) -> Manifest:
        return dataclasses.replace(manifest, files=tuple(described if file.path == path else file for file in manifest.files))

    edit_manifest(bundle, vouch)


def change_constant(model: onnx.ModelProto, suffix: str, change: Callable[..., object]) -> None:
    """Replace each constant whose name ends in `suffix`, one a ring geometry, by `change(array)`, of the same dtype."""
    found = [tensor for tensor in model.graph.initializer if tensor.name.endswith(suffix)]
    assert found, f"no constant ends in {suffix}"
    for tensor in found:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(array.dtype.type(change(array.copy())), tensor.name))


def _replace(path: Path, data: bytes) -> None:
    # The old one may be a link to the user's own file.
    path.unlink()
    path.write_bytes(data)
