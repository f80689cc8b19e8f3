"""Engines from a bundle: each graph of a target, compiled for each compute capability, its plan checked, recorded in the manifest.

The engine is compiled from the very file of the bundle whose hash the manifest holds, the file that was proven elsewhere. It is
`engines/TARGET-VERSION-smNN-fp16/decode.engine`, and beside it stands `decode.json`, the report. An engine whose plan breaks a promise is
not kept: its report stays as `decode.failed.json`, so that there is something to read.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from sinkring.exporter.builder_options import BuilderOptions
from sinkring.exporter.bundle_writer import locked, sha256_of
from sinkring.exporter.engine_builder import Progress, ShapeRange, check_precision, check_sm, compile_engine, load_builder, present_sm
from sinkring.exporter.plan import PlanReport, read_plan
from sinkring.exporter.sampling_head import append_sampling_head
from sinkring.runtime.backends.engine import engine_target
from sinkring.runtime.bundle import check_consistent
from sinkring.runtime.errors import BuildError, BundleError, UnsupportedError
from sinkring.runtime.manifest import CONTRACT_KEY, MANIFEST_NAME, Engine, File, Graph, Manifest, Role, StateTensor, rows_name

ENGINES_FOLDER = "engines"
# What the folder of an engine calls the bundle's dtype.
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class BuildReport:
    """One engine: what it was built from, with what, and its plan. `dtype` is that of the bundle, `build_s` wall time in seconds.

    contract: what the graph says it was made for, for the runtime to hold against the manifest, as an engine itself does not say it.
    """

    role: Role
    target: str
    sm: int
    builder_version: str
    dtype: str
    optimization_level: int | None
    workspace_mib: int | None
    sample_top_k: int | None
    engine_path: str
    engine_bytes: int
    build_s: float
    graph_path: str
    graph_sha256: str
    contract: dict[str, Any]
    profiles: dict[str, ShapeRange]
    plan: PlanReport
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def build_engine(
    bundle: str | Path,
    target: str = "tensorrt-rtx",
    sm: Sequence[int] | None = None,
    *,
    optimization_level: int | None = None,
    workspace_mib: int | None = None,
    timing_cache: str | Path | None = None,
    next_token: bool = False,
    sample_top_k: int | None = None,
    progress: Progress | None = None,
) -> list[BuildReport]:
    """Build an engine from every graph that `bundle` holds for `target`, for every compute capability in `sm`.

    sm: 10 x major + minor; default 89 for "tensorrt-rtx", which needs no GPU, and the GPU that is present for "tensorrt".
    optimization_level, workspace_mib, timing_cache: see BuilderOptions; only "tensorrt" has timings to keep. next_token: decode engines
    pick the likeliest token, for `Stream.extend` to run without the host. sample_top_k: they sample it, from up to so many.
    progress: called with (phase, steps done, steps in all) while building; an exception from it cancels the build.
    Each finished engine is in the manifest before the next is begun. An older one for the same graph, target and sm is replaced.

    Raises UnsupportedError (target, sm), DependencyError (package, driver), InputError (options), BundleError (missing or damaged files,
    no graph for the target, a timing cache of another builder), BuildError (graph refused, or a plan that copies a cache; see
    PlanReport.faults).
    """
    folder = Path(bundle)
    options = BuilderOptions(
        optimization_level, workspace_mib, None if timing_cache is None else Path(timing_cache), next_token, sample_top_k
    )
    options.check_target(target)
    trt = load_builder(target)
    manifest = Manifest.read(folder)
    check_consistent(folder, manifest)
    if (next_token or sample_top_k) and manifest.embedding is not None:
        asked = "next_token" if next_token else "sample_top_k"
        raise UnsupportedError(f"{folder}: {asked}, and its graphs take embedded rows, not the token that was picked; build without it")
    sms = tuple(sm) if sm is not None else ((89,) if target == "tensorrt-rtx" else (present_sm(),))
    if not sms:
        raise UnsupportedError("sm: no compute capability named; name at least one, as 10 x major + minor (89 for 8.9)")
    for one in sms:
        check_sm(trt, target, one)
        check_precision(manifest, one)
    wanted = graphs_to_build(manifest, target, sms)
    if (options.next_token or options.sample_top_k) and wanted[0][0].update == "rows":
        raise UnsupportedError(
            f"next_token, sample_top_k: {wanted[0][0].path} only reads its caches, whose rows are written between steps; leave them out, "
            "or export for a target that updates them in place"
        )
    checked: dict[str, str] = {}
    for graph, _ in wanted:
        _check_files(folder, manifest, graph, checked)
    return [_build_one(folder, trt, graph, one, options, progress) for graph, one in wanted]


def graphs_to_build(manifest: Manifest, target: str, sms: Sequence[int]) -> list[tuple[Graph, int]]:
    """Each graph and GPU of an engine of `target`, by role. The graph's target is then the engine's, also where the graphs are the portable
    ones or Turing's own.

    Raises BundleError for a bundle that has no graph for the target.
    """
    pairs = []
    for sm in sms:
        own = engine_target(manifest, target, sm)
        found = manifest.graphs_for(own) or (manifest.graph("decode", own),)
        pairs += [(dataclasses.replace(graph, target=target), sm) for graph in found]
    return sorted(pairs, key=lambda pair: pair[0].role)


def _build_one(folder: Path, trt: ModuleType, graph: Graph, sm: int, options: BuilderOptions, progress: Progress | None) -> BuildReport:
    manifest = Manifest.read(folder)
    # Again for each: a build takes minutes, in which the bundle may have been exported anew.
    _check_file(folder, manifest.file(graph.path), {})
    proto = onnx.load(folder / graph.path, load_external_data=False)
    header = proto.graph
    contract: dict[str, Any] = next((json.loads(entry.value) for entry in proto.metadata_props if entry.key == CONTRACT_KEY), {})
    profiles = _profiles(header, graph)
    states = _bound_states(header, graph, manifest.states)
    stem = f"{ENGINES_FOLDER}/{graph.target}-{trt.__version__}-sm{sm}-{PRECISIONS[manifest.dtype]}/{graph.role}"
    engine_path, report_path, failed_path = f"{stem}.engine", f"{stem}.json", f"{stem}.failed.json"

    def named(phase: str, done: int, steps: int) -> None:
        assert progress is not None
        progress(f"{graph.role} sm{sm}: {phase}", done, steps)

    top_k = options.sample_top_k if graph.role == "decode" else None
    # The file stays as it was proven: the head is put behind its logits in memory.
    headed = None if top_k is None else append_sampling_head(proto, top_k).SerializeToString()
    say = named if progress is not None else None
    compiled = compile_engine(trt, graph.target, folder / graph.path, sm, profiles, say, options, headed)
    plan = read_plan(compiled.plan_text, states, graph.tokens, graph.update)
    report = BuildReport(
        role=graph.role,
        target=graph.target,
        sm=sm,
        builder_version=trt.__version__,
        dtype=manifest.dtype,
        optimization_level=options.optimization_level,
        workspace_mib=options.workspace_mib,
        sample_top_k=top_k,
        engine_path=engine_path,
        engine_bytes=compiled.engine.nbytes,
        build_s=round(compiled.build_s, 3),
        graph_path=graph.path,
        graph_sha256=manifest.file(graph.path).sha256,
        contract=contract,
        profiles=profiles,
        plan=plan,
        faults=plan.faults(),
        warnings=plan.warnings(),
    )
    (folder / engine_path).parent.mkdir(parents=True, exist_ok=True)
    if report.faults:
        _write(folder / failed_path, report.to_json().encode())
        if plan.lacks_fused_kernel():
            model = manifest.model
            raise BuildError(
                f"{graph.path} for {graph.target} sm={sm}: {graph.target} {trt.__version__} has no fused attention kernel for "
                f"H={model.query_heads} query heads, G={model.kv_heads} KV heads, D={model.head_size}, and without one every step copies "
                f"the caches: {report.faults[0]}; all of it is in {failed_path}; run the bundle on onnxruntime, or "
                "export a model with other heads"
            )
        more = f" (and {len(report.faults) - 1} more)" if len(report.faults) > 1 else ""
        raise BuildError(
            f"{graph.path} for {graph.target} sm={sm}: the engine would copy or miss a cache: {report.faults[0]}{more}; "
            f"all of them are in {failed_path}; export again for target {graph.target!r}"
        )
    contents: dict[str, bytes | memoryview] = {engine_path: compiled.engine, report_path: report.to_json().encode()}
    # Hashed before the lock is taken, which other builds may be waiting for.
    files = tuple(File(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in contents.items())
    with locked(folder):
        _check_unchanged(folder, report)
        _forget(folder, report)
        for path, content in contents.items():
            _write(folder / path, content)
        (folder / failed_path).unlink(missing_ok=True)
        _record(folder, report, files)
    return report


def _check_unchanged(folder: Path, report: BuildReport) -> None:
    found = Manifest.read(folder).file(report.graph_path).sha256
    if found != report.graph_sha256:
        raise BundleError(
            f"{report.graph_path}: its sha256 was {report.graph_sha256[:12]}... when the build began and is {found[:12]}... now: the "
            "bundle was exported again meanwhile; build again"
        )


def _check_files(folder: Path, manifest: Manifest, graph: Graph, checked: dict[str, str]) -> None:
    """The graph and the weights it names must be what the manifest says. `checked` remembers hashes of files that graphs share."""
    _check_file(folder, manifest.file(graph.path), checked)
    base = Path(graph.path).parent
    for tensor in onnx.load(folder / graph.path, load_external_data=False).graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                _check_file(folder, manifest.file((base / entry.value).as_posix()), checked)


def _check_file(folder: Path, file: File, checked: dict[str, str]) -> None:
    if file.path in checked:
        return
    path = folder / file.path
    if not path.is_file():
        raise BundleError(f"{file.path}: is in {MANIFEST_NAME} but not in the bundle; export again")
    checked[file.path] = sha256_of(path)
    if checked[file.path] != file.sha256:
        raise BundleError(
            f"{file.path}: has sha256 {checked[file.path][:12]}... and {path.stat().st_size} bytes, {MANIFEST_NAME} says "
            f"{file.sha256[:12]}... and {file.bytes} bytes; the file was changed after the export, export again"
        )


def _profiles(header: onnx.GraphProto, graph: Graph) -> dict[str, ShapeRange]:
    """Ranges of the inputs with dynamic axes: T tokens of a chunk, tuned for a full one; N rows of logits, tuned for one."""
    ranges = {"T": (1, graph.tokens, graph.tokens), "N": (1, 1, graph.tokens)}
    profiles: dict[str, ShapeRange] = {}
    for tensor in header.input:
        dims = tensor.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            continue
        for dim in dims:
            if not dim.HasField("dim_value") and dim.dim_param not in ranges:
                raise UnsupportedError(
                    f"{graph.path}: input {tensor.name!r} has the dynamic axis {dim.dim_param!r}; engines know T (tokens) and N "
                    "(rows of logits), every other size must be fixed when exporting"
                )
        smallest, best, largest = (
            tuple(dim.dim_value if dim.HasField("dim_value") else ranges[dim.dim_param][which] for dim in dims) for which in range(3)
        )
        profiles[tensor.name] = (smallest, best, largest)
    return profiles


def _bound_states(header: onnx.GraphProto, graph: Graph, states: tuple[StateTensor, ...]) -> tuple[StateTensor, ...]:
    """The states with the shapes of this graph's inputs: a prefill graph binds one row of a batch."""
    inputs = {tensor.name: tuple(dim.dim_value for dim in tensor.type.tensor_type.shape.dim) for tensor in header.input}
    outputs = {tensor.name for tensor in header.output}
    for state in states:
        written = state.updated if graph.update == "in_place" else rows_name(state.name)
        for name, names in ((state.name, set(inputs)), (written, outputs)):
            if name not in names:
                raise BundleError(f"{graph.path}: has no tensor {name!r}, {MANIFEST_NAME} lists it as a state; export again")
    return tuple(dataclasses.replace(state, shape=inputs[state.name]) for state in states)


def _forget(folder: Path, report: BuildReport) -> None:
    """Take an older engine for the same role, target and sm out of the bundle. The caller holds the lock.

    First the manifest, then the files: a build that is killed half-way leaves a bundle without this engine, never one with a wrong hash.
    """
    manifest = Manifest.read(folder)
    old = [engine for engine in manifest.engines if (engine.role, engine.target, engine.sm) == (report.role, report.target, report.sm)]
    if not old:
        return
    gone = {path for engine in old for path in (engine.path, engine.report)}
    manifest = dataclasses.replace(
        manifest,
        engines=tuple(engine for engine in manifest.engines if engine not in old),
        files=tuple(file for file in manifest.files if file.path not in gone),
    )
    _write(folder / MANIFEST_NAME, manifest.to_json().encode())
    for path in gone:
        (folder / path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another engine is still in it
            (folder / path).parent.rmdir()
    (folder / report.engine_path).parent.mkdir(parents=True, exist_ok=True)


def _record(folder: Path, report: BuildReport, files: tuple[File, ...]) -> None:
    """Put a finished engine and its report, in this order in `files`, into the manifest. The caller holds the lock."""
    manifest = Manifest.read(folder)
    engine = Engine(
        role=report.role,
        target=report.target,
        sm=report.sm,
        path=report.engine_path,
        builder_version=report.builder_version,
        graph_path=report.graph_path,
        graph_sha256=report.graph_sha256,
        report=files[1].path,
    )
    manifest = dataclasses.replace(manifest, engines=(*manifest.engines, engine), files=(*manifest.files, *files))
    _write(folder / MANIFEST_NAME, manifest.to_json().encode())


def _write(path: Path, content: bytes | memoryview) -> None:
    """All of it or nothing, also after a power cut: written beside, synced, then renamed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
