"""A bundle of bfloat16 with nothing rounded to it but its weights: what its graphs compute, apart from what eight bits of it are lost.

Eight bits hide a window that is off by one token. So what is proven at float32's tolerance is the bundle's own graphs, of which each cast
to bfloat16 is one to float32 instead and each cache is float32; then the file as it is has to be as near as rounding lets it be.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto
from sinkring.exporter.conformance.edited_copy import copy_bundle, edit_graph, edit_manifest
from sinkring.runtime.bfloat16 import BFLOAT16
from sinkring.runtime.manifest import CONTRACT_KEY, Manifest


def rounds_to_bfloat16(manifest: Manifest) -> bool:
    return BFLOAT16 in (manifest.dtype, manifest.cache_dtype)


def unrounded_manifest(manifest: Manifest) -> Manifest:
    """That of the copy that `copy_unrounded` makes, but for the files' hashes."""
    return dataclasses.replace(
        manifest,
        dtype=_wide(manifest.dtype),
        states=tuple(dataclasses.replace(state, dtype=_wide(state.dtype)) for state in manifest.states),
    )


def copy_unrounded(bundle: Path, manifest: Manifest, out: Path) -> Manifest:
    """A copy of `bundle` in the new folder `out` with no rounding to bfloat16; returns its manifest. Weights are linked, not copied."""
    copy_bundle(bundle, manifest, out)
    edit_manifest(out, unrounded_manifest)
    for path in sorted({graph.cpu_path for graph in manifest.graphs}):
        edit_graph(out, path, without_rounding(unrounded_manifest(manifest)))
    return Manifest.read(out)


def without_rounding(manifest: Manifest) -> Callable[[onnx.ModelProto], None]:
    """The change to one graph that a CPU runs. manifest: what the graph is made for afterwards."""

    def change(model: onnx.ModelProto) -> None:
        _round_nothing(model.graph)
        for entry in model.metadata_props:
            if entry.key == CONTRACT_KEY:
                entry.value = json.dumps(manifest.contract(), sort_keys=True)

    return change


def _round_nothing(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
            # The branches of an If.
            if attribute.HasField("g"):
                _round_nothing(attribute.g)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    # They follow from the rest, and were right before.
    del graph.value_info[:]


def _wide(dtype: str) -> str:
    return "float32" if dtype == BFLOAT16 else dtype
