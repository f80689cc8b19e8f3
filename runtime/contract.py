"""What a graph, or an engine made from it, must be to run under a manifest: its tensors, and the contract it was made for.

Buffers are bound by address: a graph of other shapes than the manifest's would read and write past their ends.
"""

import json
from collections.abc import Mapping
from typing import Any

from sinkring.runtime.errors import BundleError
from sinkring.runtime.manifest import Manifest, Role, Update, rows_name

# dtype and shape of each tensor by name; None is a size that varies from call to call, T or N.
Tensors = dict[str, tuple[str, tuple[int | None, ...]]]


# Output int64 [B,1] that a decode engine may have beside those of its graph: the likeliest token, for a greedy loop on the device.
NEXT_TOKEN = "next_token"


def expected_tensors(manifest: Manifest, role: Role, update: Update = "in_place") -> tuple[Tensors, Tensors]:
    """Inputs and outputs of the graph of `role`. A prefill graph binds one row of the batch. update: of the graph."""
    decodes = role == "decode"
    batch = manifest.batch if decodes else 1
    several = 1 if decodes else None
    states: Tensors = {
        state.name: (state.dtype, tuple(batch if axis == state.batch_axis else size for axis, size in enumerate(state.shape)))
        for state in manifest.states
    }
    inputs: Tensors = {
        manifest.input_name: (manifest.input_dtype, (batch, several, *manifest.input_row)),
        "position": ("int64", (batch,)),
        **{ring.write_index: ("int64", (batch,)) for ring in manifest.rings},
        **({} if decodes else {"rows": ("int64", (None,))}),
        **states,
    }
    outputs: Tensors = {"logits": ("float32", (batch, several, manifest.model.vocab_size))}
    for state in manifest.states:
        dtype, shape = states[state.name]
        if update == "in_place":
            outputs[state.updated] = dtype, shape
        else:
            outputs[rows_name(state.name)] = dtype, (*shape[:-2], several, shape[-1])
    return inputs, outputs


def check_tensors(where: str, kind: str, side: str, found: Tensors, expected: Tensors) -> None:
    """Raises BundleError for the first tensor that differs. kind: "graph" or "engine"; side: "input" or "output"; `where` is named."""
    mend = "the bundle is damaged, export again" if kind == "graph" else "build it again"
    if odd := sorted(found.keys() ^ expected.keys()):
        has, lacks = (f"the {kind}", "the manifest") if odd[0] in found else ("the manifest", f"the {kind}")
        raise BundleError(f"{where}: {side} {odd[0]!r} is in {has} but not in {lacks}; {mend}")
    for name, (dtype, shape) in expected.items():
        if found[name] != (dtype, shape):
            raise BundleError(
                f"{where}: {side} {name!r} is {found[name][0]} {found[name][1]} in the {kind}, {dtype} {shape} by the manifest; {mend}"
            )


def check_contract(where: str, said: Mapping[str, Any], manifest: Manifest, update: Update = "in_place") -> None:
    """The graph was made for one geometry, policy and set of states, and `said` which. Raises BundleError for the first that differs.

    update: of the graph, by the manifest.
    """
    # A graph of the usual update says none, and one that takes token ids no embedding.
    found = {"update": "in_place", **said}
    for name, value in {"update": "in_place", **dict.fromkeys(said.keys() & {"embedding"}), **manifest.contract(update)}.items():
        if found.get(name) != value:
            raise BundleError(
                f"{where}: was made for {name} {_shortened(found.get(name))}, the manifest says {_shortened(value)}; "
                "the bundle is damaged, export again"
            )


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
