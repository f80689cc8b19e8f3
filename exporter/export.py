"""export_decoder: a trained decoder -> a bundle folder."""

import dataclasses
import gc
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import onnx_ir as ir
import torch
from sinkring.exporter.angles import POSITION_LIMIT
from sinkring.exporter.bundle_writer import check_replaceable, describe_file, new_bundle, replace_text
from sinkring.exporter.cache_plan import (
    CachePlan,
    CacheRequest,
    each_state,
    observe_layers,
    plan_caches,
    updated_name,
)
from sinkring.exporter.embedding_table import check_inputs, lookup_of, takes_embeddings, write_embedding
from sinkring.exporter.everything_used import check_everything_used
from sinkring.exporter.finite import check_finite
from sinkring.exporter.frontend import trace_step
from sinkring.exporter.lower import lower_for, simplify, widen
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.rotary import frequencies_for
from sinkring.exporter.targets import TARGETS, Target, check_dtypes, find_target
from sinkring.exporter.tokenizer_files import write_tokenizer
from sinkring.exporter.weight_formats import FORMATS, WeightFormat, check_weight_format, choose_weights
from sinkring.exporter.weights import WeightsFile
from sinkring.models.errors import ModelError
from sinkring.models.registry import context_tokens, find_family
from sinkring.models.source import LoadedModel, load_model
from sinkring.models.token_call import text_config
from sinkring.runtime.errors import BundleError, GeometryError, InputError, UnsupportedError
from sinkring.runtime.manifest import (
    CONTRACT_KEY,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Graph,
    Manifest,
    ModelInfo,
    Policy,
    Role,
    StateTensor,
    Tokenizer,
    WeightForm,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
    cache_dtype: str | None = None,
    weights: WeightFormat = "fp32",
    keep_fp32: Sequence[str] = (),
    block: int | None = None,
    inputs: str | None = None,
    targets: Iterable[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export `model` (a Hugging Face folder, a .gguf file, or a known name such as "smollm2") to the bundle folder `out`.

    policy: "streaming" (StreamingLLM positions) or "native" (the positions the model was trained with).
    sinks (S, default 4), window (W, the current token included, default 256), chunk (longest prefill call), slack (tokens that can be
    rolled back): tokens. capacity: full attention instead of sinks and a window, policy "native": a linear cache that is full after so
    many tokens and from which any number can be rolled back.
    batch (B): rows of the decode graph. dtype: of the weights and of what flows between them, "fp32", "fp16" or "bf16"; attention, norms,
    angles and logits are float32 in any case. cache_dtype: what keys and values are stored as, by default `dtype`, "fp32" or half the
    bytes: "fp16" at a rounding of 2**-12, "bf16" at 2**-9. targets: which runtimes get graphs, by default all that can run `weights`.
    weights: how matrices are stored: "fp32" (as `dtype` says), "int8", "int8-rows", "int4", "fp8". For the target "onnxruntime", the
    default of all but the last, in blocks of 32 with zero points, and "int8-rows" with one scale for each output and products of integers;
    for "tensorrt-rtx" and "tensorrt" as DequantizeLinear without zero points, which engines are built from: name `targets` of one kind.
    block: of int4 for an engine, how many weights share a scale: 32 (the default), 64 or 128, less where the inputs of a matrix are no
    multiple. keep_fp32: patterns (fnmatch) of the names of weights that stay as they are, such as "model.layers.0.*".
    inputs: what a step of the graphs is fed, "tokens" (ids) or "embeddings" (rows float32 [hidden] of the caller's making: see
    Stream.feed_embeddings); by default ids, but for a family whose steps take more than a token.
    progress is called with a line at the start of each stage.

    The bundle appears whole or not at all, and only once each weight and state of its decode graphs was seen to matter. Returns its
    manifest.
    Raises GeometryError, InputError, UnsupportedError, BundleError.
    """
    out = _check_out(out)
    say = progress or (lambda _: None)
    request = _check_numbers(policy, sinks, window, capacity, chunk, batch, slack, dtype)
    cache_type = _check_cache_dtype(cache_dtype, dtype)
    check_weight_format(weights, keep_fp32, block)
    if weights != "fp32" and dtype == "bf16":
        raise UnsupportedError(
            f"weights={weights!r} with dtype='bf16': no runtime here multiplies such weights with bfloat16; use dtype fp32, whose caches "
            "may still be bf16 (cache_dtype)"
        )
    check_inputs(inputs)
    chosen, form = _find_targets(targets, weights)
    check_dtypes(chosen, dtype, _name(cache_type))
    if block is not None and form != "qdq":
        raise InputError(
            f"block={block} for target {chosen[0].name}, whose blocks have 32 weights: leave it out, or name an engine's target"
        )
    check_replaceable(out, overwrite)
    say(f"loading {model}")
    try:
        loaded = load_model(str(model))
        family = find_family(loaded.config)
        embedded = takes_embeddings(family, inputs)
        context = context_tokens(loaded.config, family)
        caches = plan_caches(observe_layers(loaded.model, family, context), request)
        _check_context(context, caches, chunk=chunk, slack=slack)
        _check_memory(caches, batch, cache_type)
        for rope, geometry in caches.ropes().items():
            frequencies_for(loaded.model, family, rope, policy, geometry)
    except ModelError as error:
        raise UnsupportedError(str(error)) from None
    check_finite(loaded.model)
    if weights != "fp32":
        say(f"quantizing to {weights}")
    beside, either_sign = lookup_of(loaded.model, family) if embedded else None, all(target.negative_scales for target in chosen)
    stored = choose_weights(loaded, weights, keep_fp32, form, block, beside, either_sign)
    try:
        with new_bundle(out, overwrite) as part:
            # Only now: what a layer was observed to ask, and its blocks, are those of the model as it was loaded.
            _round_weights(loaded.model, DTYPES[dtype])
            plan = _plan(loaded, caches, cache_type, context, policy, batch, chunk)
            plan = dataclasses.replace(plan, weights=stored.described(weights))
            tokenizer = write_tokenizer(part, loaded)
            blocks = stored.by_initializer(loaded.model)
            if embedded:
                plan = dataclasses.replace(plan, embedding=write_embedding(part, loaded.model, family, blocks))
            graphs: list[Graph] = []
            roles: tuple[Role, ...] = ("decode", "prefill")
            with WeightsFile(part / WEIGHTS_NAME) as weights_file:
                for role in roles:
                    say(f"tracing {role}")
                    traced = trace_step(
                        loaded.model,
                        family,
                        caches,
                        role=role,
                        policy=policy,
                        batch=batch,
                        chunk=chunk,
                        cache_dtype=cache_type,
                        embedded=embedded,
                    )
                    tokens = 1 if role == "decode" else chunk
                    graphs += _save_graphs(part, weights_file, simplify(traced, blocks, form), role, tokens, chosen, plan)
            say("writing the manifest")
            # What comes now reads the written weights: the model's own would be a second copy in memory.
            del loaded, traced, stored, blocks
            gc.collect()
            manifest = _complete(part, plan, tokenizer, graphs)
            replace_text(part / MANIFEST_NAME, manifest.to_json())
            check_everything_used(part, manifest, say)
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
) -> CacheRequest:
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
    request = CacheRequest(sinks, window, capacity, chunk, slack)
    if capacity is not None:
        _check_capacity(policy, request, capacity)
    # What is wrong whatever the model says so before it is loaded.
    request.geometry()
    return request


def _check_cache_dtype(cache_dtype: str | None, dtype: str) -> torch.dtype:
    """A cache is as wide as the rows that are written to it, or narrower, or float32."""
    if cache_dtype is None or cache_dtype == dtype:
        return DTYPES[dtype]
    if not isinstance(cache_dtype, str) or cache_dtype not in DTYPES:
        raise UnsupportedError(f"cache_dtype {cache_dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    return DTYPES[cache_dtype]


def _round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """In place, one by one. Buffers stay: rotary frequencies in float16 would be another model's, the further off the older a stream is."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_capacity(policy: str, request: CacheRequest, capacity: int) -> None:
    if policy == "streaming":
        raise GeometryError(
            f"capacity={capacity} with policy streaming, whose streams have no end: use policy native for a cache of {capacity} tokens, "
            "or sinks and window in its place"
        )
    for name, value in (("sinks", request.sinks), ("window", request.window)):
        if value is not None:
            raise GeometryError(
                f"{name}={value} with capacity={capacity}: every token of such a cache sees all before it; leave out {name} or capacity"
            )
    if request.slack < 0:
        raise GeometryError(f"slack={request.slack}: must be 0 or more tokens")
    if request.chunk < 1:
        raise GeometryError(f"chunk={request.chunk}: must be 1 or more tokens per prefill call")
    if capacity >= 1 and request.chunk > capacity:
        raise GeometryError(f"chunk={request.chunk} is more than capacity={capacity}: use a chunk of at most {capacity}, or more capacity")


def _check_memory(caches: CachePlan, batch: int, cache_type: torch.dtype) -> None:
    """The trace holds the caches of all rows, and so does whoever runs the bundle."""
    row_elements = sum(2 * seen.kv_heads * seen.head_size * caches.geometry_of(layer).capacity for layer, seen in enumerate(caches.layers))
    row_bytes = row_elements * cache_type.itemsize
    present = describe_machine().memory_bytes
    if present is not None and batch * row_bytes > present:
        raise GeometryError(
            f"batch={batch}: its caches take {batch * row_bytes} bytes, {row_bytes} a row, and this machine has {present} bytes of memory; "
            "use a smaller batch or window"
        )


def _find_targets(names: Iterable[str] | None, weights: WeightFormat) -> tuple[list[Target], WeightForm]:
    """The targets, and the one form in which they all read `weights`."""
    if names is None:
        # Those of the first form that has the format.
        form: WeightForm = next((form for form, formats in FORMATS.items() if weights in formats), "blocks")
        usual = [target for target in TARGETS.values() if target.by_default]
        return [target for target in usual if weights == "fp32" or target.form_of(weights) == form], form
    if isinstance(names, str) or not isinstance(names, Iterable) or not (listed := list(names)):
        raise InputError(f"targets={names!r}: give a list of one or more of {', '.join(TARGETS)}")
    if wrong := [name for name in listed if not isinstance(name, str)]:
        raise InputError(f"targets: {wrong[0]!r} is {type(wrong[0]).__name__}: give a list of one or more of {', '.join(TARGETS)}")
    found = [find_target(name) for name in dict.fromkeys(listed)]
    if weights == "fp32":
        return found, "blocks"
    for target in found:
        if target.form_of(weights) is None:
            able = [other.name for other in TARGETS.values() if other.form_of(weights) is not None]
            raise UnsupportedError(f"weights={weights!r}: target {target.name} does not run them; use weights fp32, or: {', '.join(able)}")
    first, read_as = found[0], found[0].form_of(weights)
    assert read_as is not None, "checked above"
    if other := next((target for target in found if target.form_of(weights) != read_as), None):
        raise UnsupportedError(
            f"weights={weights!r}: targets {first.name} and {other.name} read them in different forms; export a bundle for each"
        )
    return found, read_as


def _check_context(context: int, caches: CachePlan, *, chunk: int, slack: int) -> None:
    for name, value in (("chunk", chunk), ("slack", slack)):
        if value > context:
            raise GeometryError(f"{name}={value} is more than the {context} tokens the model was trained for: use a {name} of at most that")
    geometry = caches.rings[0].geometry
    sinks, window = geometry.sinks_tokens, geometry.window_tokens
    if not geometry.wraps and window > context:
        raise GeometryError(
            f"capacity={window} is more than the {context} tokens the model was trained for: use at most that, "
            "or policy streaming for streams without end"
        )
    if sinks + window > context:
        raise GeometryError(
            f"sinks={sinks} and window={window} are {sinks + window} tokens, the model was trained for {context}: "
            f"use {f'a window of at most {context - sinks}' if sinks < context else 'fewer sinks; 4 suit most'}"
        )


def _save_graphs(
    part: Path, weights: WeightsFile, simplified: ir.Model, role: Role, tokens: int, targets: list[Target], plan: Manifest
) -> list[Graph]:
    """One file per form, and its widened one if it computes in bfloat16; targets that take the same form share them. Each carries the
    contract of `plan`."""
    files: dict[type, tuple[str, str | None]] = {}
    graphs = []
    for target in targets:
        form = target.attention[role]
        if form not in files:
            lowered = lower_for(target, role, simplified)
            widened = widen(lowered)
            stem = f"{role}.{form.FORM}"
            files[form] = f"{stem}.onnx", None if widened is None else f"{stem}.widened.onnx"
            for graph, name in ((lowered, files[form][0]), (widened, files[form][1])):
                if graph is not None and name is not None:
                    graph.metadata_props[CONTRACT_KEY] = json.dumps(plan.contract(target.update), sort_keys=True)
                    weights.save_graph(graph, part / name)
        path, wide_path = files[form]
        graphs.append(Graph(role=role, target=target.name, path=path, tokens=tokens, widened=wide_path, update=target.update))
    return graphs


def _plan(
    loaded: LoadedModel, caches: CachePlan, cache_type: torch.dtype, context: int, policy: Policy, batch: int, chunk: int
) -> Manifest:
    """The manifest as far as it is known before anything is written."""
    first = caches.layers[0]
    return Manifest(
        model=ModelInfo(
            architecture=loaded.architecture,
            source=loaded.source,
            source_sha256=loaded.source_sha256,
            layers=len(caches.layers),
            hidden_size=text_config(loaded.model).hidden_size,
            query_heads=first.query_heads,
            kv_heads=first.kv_heads,
            head_size=first.head_size,
            vocab_size=text_config(loaded.model).vocab_size,
            trained_context_tokens=context,
            weight_bytes=0,
        ),
        policy=policy,
        batch=batch,
        chunk=chunk,
        dtype=_name(loaded.model.dtype),
        position_limit=POSITION_LIMIT,
        rings=caches.rings,
        states=tuple(
            StateTensor(
                name=name,
                updated=updated_name(name),
                kind="ring" if caches.rings[ring].geometry.wraps else "linear",
                shape=(batch, caches.layers[layer].kv_heads, caches.rings[ring].geometry.capacity, caches.layers[layer].head_size),
                dtype=_name(cache_type),
                batch_axis=0,
                initial=0.0,
                ring=ring,
                layer=layer,
            )
            for layer, ring, name in each_state(caches)
        ),
        graphs=(),
        files=(),
        made_with={
            "python": platform.python_version(),
            **{package: version(package) for package in ("sinkring", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")},
        },
    )


def _complete(part: Path, plan: Manifest, tokenizer: Tokenizer | None, graphs: list[Graph]) -> Manifest:
    """`plan` with what was written to `part`."""
    paths = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
    return dataclasses.replace(
        plan,
        model=dataclasses.replace(plan.model, weight_bytes=(part / WEIGHTS_NAME).stat().st_size),
        graphs=tuple(graphs),
        files=tuple(describe_file(part, path) for path in paths),
        tokenizer=tokenizer,
    )
