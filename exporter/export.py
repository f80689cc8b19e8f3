"""export_decoder: a trained decoder -> a bundle folder."""

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import get_args

import onnx_ir as ir
from sinkring.exporter.angles import POSITION_LIMIT
from sinkring.exporter.bundle_writer import check_replaceable, describe_file, new_bundle, replace_text
from sinkring.exporter.finite import check_finite
from sinkring.exporter.frontend import ring_names, trace_step, updated_name, write_index_name
from sinkring.exporter.lower import lower_for, simplify
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.targets import TARGETS, Target, find_target
from sinkring.exporter.weights import WeightsFile
from sinkring.models.errors import ModelError
from sinkring.models.registry import DecoderShape, decoder_shape, find_family
from sinkring.models.rope import rope_frequencies, rope_length
from sinkring.models.source import LoadedModel, load_model
from sinkring.runtime.errors import BundleError, GeometryError, InputError, UnsupportedError
from sinkring.runtime.manifest import (
    CONTRACT_KEY,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Graph,
    Manifest,
    ModelInfo,
    Policy,
    Ring,
    Role,
    StateTensor,
    Tokenizer,
)
from sinkring.runtime.ring import RingGeometry

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
DTYPES = {"fp32": "float32"}
# TensorRT pads a cache whose slots are no multiple of this, at the price of a copy of it per layer and chunk.
CAPACITY_MULTIPLE = 8
SINKS, WINDOW = 4, 256
# File systems stop at 255; the folder that becomes the bundle is called `.NAME.01234567.part` until then.
LONGEST_NAME_BYTES = 240

Progress = Callable[[str], None]


def export_decoder(
    model: str | Path,
    out: str | Path,
    *,
    policy: Policy = "streaming",
    sinks: int | None = None,
    window: int | None = None,
    capacity: int | None = None,
    chunk: int = 64,
    batch: int = 1,
    slack: int = 0,
    dtype: str = "fp32",
    targets: Iterable[str] = tuple(TARGETS),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export `model` (a Hugging Face folder, a .gguf file, or a known name such as "smollm2") to the bundle folder `out`.

    policy: "streaming" (StreamingLLM positions) or "native" (the positions the model was trained with).
    sinks (S, default 4), window (W, the current token included, default 256), chunk (longest prefill call), slack (tokens that can be
    rolled back): tokens. capacity: full attention instead of sinks and a window, policy "native": a linear cache that is full after so
    many tokens and from which any number can be rolled back.
    batch (B): rows of the decode graph. dtype: "fp32". targets: which runtimes get graphs.
    progress is called with a line at the start of each stage.

    The bundle appears whole or not at all. Returns its manifest.
    Raises GeometryError, InputError, UnsupportedError, BundleError.
    """
    out = _check_out(out)
    say = progress or (lambda _: None)
    geometry = _check_numbers(policy, sinks, window, capacity, chunk, batch, slack, dtype)
    chosen = _find_targets(targets)
    check_replaceable(out, overwrite)
    say(f"loading {model}")
    try:
        loaded = load_model(str(model))
        family = find_family(loaded.config)
    except ModelError as error:
        raise UnsupportedError(str(error)) from None
    shape = decoder_shape(loaded.config)
    _check_context(shape, geometry, chunk=chunk, slack=slack)
    _check_memory(shape, geometry, batch)
    try:
        length = rope_length(loaded.config, policy, geometry.sinks_tokens, geometry.window_tokens)
        rope_frequencies(attrgetter(family.rotary)(loaded.model), length)
    except ModelError as error:
        raise UnsupportedError(str(error)) from None
    check_finite(loaded.model)
    try:
        with new_bundle(out, overwrite) as part:
            plan = _plan(loaded, shape, geometry, policy, batch, chunk)
            graphs: list[Graph] = []
            roles: tuple[Role, ...] = ("decode", "prefill")
            with WeightsFile(part / WEIGHTS_NAME) as weights:
                for role in roles:
                    say(f"tracing {role}")
                    traced = trace_step(loaded.model, family, shape, geometry, role=role, policy=policy, batch=batch, chunk=chunk)
                    tokens = 1 if role == "decode" else chunk
                    graphs += _save_graphs(part, weights, simplify(traced), role, tokens, chosen, plan)
            say("writing the manifest")
            manifest = _complete(part, plan, loaded, graphs)
            replace_text(part / MANIFEST_NAME, manifest.to_json())
    except OSError as error:
        raise BundleError(f"{out}: could not be written ({error.strerror}: {error.filename or out}); nothing was left there") from error
    return manifest


def _check_out(out: str | Path) -> Path:
    if not isinstance(out, str | Path):
        raise InputError(f"out={out!r} is {type(out).__name__}: give the path of the new bundle's folder")
    said = str(out)
    if not said:
        raise InputError("out='' is empty: give the path of the new bundle's folder, or . for an empty one that you are in")
    if "\0" in said:
        raise InputError(f"out={said!r} holds a NUL, which no path can: give another")
    if too_long := [part for part in Path(said).parts if len(os.fsencode(part)) > LONGEST_NAME_BYTES]:
        raise InputError(
            f"out: a name of {len(os.fsencode(too_long[0]))} bytes ({too_long[0][:20]}...) is too long: use at most {LONGEST_NAME_BYTES}"
        )
    return Path(said)


def _check_numbers(
    policy: str, sinks: int | None, window: int | None, capacity: int | None, chunk: int, batch: int, slack: int, dtype: str
) -> RingGeometry:
    if policy not in get_args(Policy):
        raise InputError(f"policy {policy!r} is not known; use one of {', '.join(get_args(Policy))}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    optional = [(name, value) for name, value in (("sinks", sinks), ("window", window), ("capacity", capacity)) if value is not None]
    for name, value in (*optional, ("chunk", chunk), ("batch", batch), ("slack", slack)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{name}={value!r} is {type(value).__name__}: give a whole number")
    if batch < 1:
        raise GeometryError(f"batch={batch}: must be 1 or more rows")
    if capacity is not None:
        return _linear_geometry(policy, sinks, window, capacity, chunk, slack)
    sinks, window = SINKS if sinks is None else sinks, WINDOW if window is None else window
    return RingGeometry.for_chunk(sinks, window, chunk, slack, capacity_multiple=CAPACITY_MULTIPLE)


def _linear_geometry(policy: str, sinks: int | None, window: int | None, capacity: int, chunk: int, slack: int) -> RingGeometry:
    if policy == "streaming":
        raise GeometryError(
            f"capacity={capacity} with policy streaming, whose streams have no end: use policy native for a cache of {capacity} tokens, "
            "or sinks and window in its place"
        )
    for name, value in (("sinks", sinks), ("window", window)):
        if value is not None:
            raise GeometryError(
                f"{name}={value} with capacity={capacity}: every token of such a cache sees all before it; leave out {name} or capacity"
            )
    if slack:
        raise GeometryError(f"slack={slack} with capacity={capacity}: any number of tokens can be rolled back then; leave out slack")
    geometry = RingGeometry.linear(capacity, capacity_multiple=CAPACITY_MULTIPLE)
    if chunk < 1:
        raise GeometryError(f"chunk={chunk}: must be 1 or more tokens per prefill call")
    if chunk > capacity:
        raise GeometryError(f"chunk={chunk} is more than capacity={capacity}: use a chunk of at most {capacity}, or more capacity")
    return geometry


def _check_memory(shape: DecoderShape, geometry: RingGeometry, batch: int) -> None:
    """The trace holds the caches of all rows, and so does whoever runs the bundle."""
    row_bytes = 2 * shape.layers * shape.kv_heads * geometry.capacity * shape.head_size * 4
    present = describe_machine().memory_bytes
    if present is not None and batch * row_bytes > present:
        raise GeometryError(
            f"batch={batch}: its caches take {batch * row_bytes} bytes, {row_bytes} a row, and this machine has {present} bytes of memory; "
            "use a smaller batch or window"
        )


def _find_targets(names: Iterable[str]) -> list[Target]:
    if isinstance(names, str) or not isinstance(names, Iterable) or not (listed := list(names)):
        raise InputError(f"targets={names!r}: give a list of one or more of {', '.join(TARGETS)}")
    if wrong := [name for name in listed if not isinstance(name, str)]:
        raise InputError(f"targets: {wrong[0]!r} is {type(wrong[0]).__name__}: give a list of one or more of {', '.join(TARGETS)}")
    return [find_target(name) for name in dict.fromkeys(listed)]


def _check_context(shape: DecoderShape, geometry: RingGeometry, *, chunk: int, slack: int) -> None:
    sinks, window = geometry.sinks_tokens, geometry.window_tokens
    if not geometry.wraps and window > shape.context_tokens:
        raise GeometryError(
            f"capacity={window} is more than the {shape.context_tokens} tokens the model was trained for: use at most that, "
            "or policy streaming for streams without end"
        )
    for name, value in (("chunk", chunk), ("slack", slack)):
        if value > shape.context_tokens:
            raise GeometryError(
                f"{name}={value} is more than the {shape.context_tokens} tokens the model was trained for: use a {name} of at most that"
            )
    if sinks + window > shape.context_tokens:
        raise GeometryError(
            f"sinks={sinks} and window={window} are {sinks + window} tokens, the model was trained for {shape.context_tokens}: "
            f"use {f'a window of at most {shape.context_tokens - sinks}' if sinks < shape.context_tokens else 'fewer sinks; 4 suit most'}"
        )


def _save_graphs(
    part: Path, weights: WeightsFile, simplified: ir.Model, role: Role, tokens: int, targets: list[Target], plan: Manifest
) -> list[Graph]:
    """One file per form; targets that take the same form share it. Each carries the contract of `plan`."""
    files: dict[type, str] = {}
    graphs = []
    for target in targets:
        form = target.attention[role]
        if form not in files:
            files[form] = f"{role}.{form.FORM}.onnx"
            lowered = lower_for(target, role, simplified)
            lowered.metadata_props[CONTRACT_KEY] = json.dumps(plan.contract(), sort_keys=True)
            weights.save_graph(lowered, part / files[form])
        graphs.append(Graph(role=role, target=target.name, path=files[form], tokens=tokens))
    return graphs


def _plan(loaded: LoadedModel, shape: DecoderShape, geometry: RingGeometry, policy: Policy, batch: int, chunk: int) -> Manifest:
    """The manifest as far as it is known before anything is written."""
    return Manifest(
        model=ModelInfo(
            architecture=loaded.architecture,
            source=loaded.source,
            source_sha256=loaded.source_sha256,
            layers=shape.layers,
            hidden_size=shape.hidden_size,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            vocab_size=shape.vocab_size,
            trained_context_tokens=shape.context_tokens,
            weight_bytes=0,
        ),
        policy=policy,
        batch=batch,
        chunk=chunk,
        dtype="float32",
        position_limit=POSITION_LIMIT,
        rings=(Ring(write_index=write_index_name(0), geometry=geometry, layers=tuple(range(shape.layers))),),
        states=tuple(
            StateTensor(
                name=name,
                updated=updated_name(name),
                kind="ring" if geometry.wraps else "linear",
                shape=(batch, shape.kv_heads, geometry.capacity, shape.head_size),
                dtype="float32",
                batch_axis=0,
                initial=0.0,
                ring=0,
                layer=layer,
            )
            for layer in range(shape.layers)
            for name in ring_names(layer)
        ),
        graphs=(),
        files=(),
        made_with={
            "python": platform.python_version(),
            **{package: version(package) for package in ("sinkring", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")},
        },
    )


def _complete(part: Path, plan: Manifest, loaded: LoadedModel, graphs: list[Graph]) -> Manifest:
    """`plan` with what was written to `part`."""
    tokenizer = _write_tokenizer(part, loaded)
    paths = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
    return dataclasses.replace(
        plan,
        model=dataclasses.replace(plan.model, weight_bytes=(part / WEIGHTS_NAME).stat().st_size),
        graphs=tuple(graphs),
        files=tuple(describe_file(part, path) for path in paths),
        tokenizer=tokenizer,
    )


def _write_tokenizer(part: Path, loaded: LoadedModel) -> Tokenizer | None:
    if loaded.tokenizer_json is None:
        return None
    (part / TOKENIZER_NAME).write_text(loaded.tokenizer_json, encoding="utf-8")
    if loaded.chat_template is not None:
        (part / CHAT_TEMPLATE_NAME).write_text(loaded.chat_template, encoding="utf-8")
    return Tokenizer(
        tokenizer=TOKENIZER_NAME,
        chat_template=None if loaded.chat_template is None else CHAT_TEMPLATE_NAME,
        bos_id=loaded.bos_id,
        stop_ids=loaded.stop_ids,
    )
