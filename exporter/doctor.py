"""What this machine has, what it lacks, and how to get it.

Imports none of the packages it reports on, so it is quick and works where they are broken: a package is looked up by its metadata and by
whether its module can be found. Lowest versions and extras are read from sinkring's own metadata, which pyproject.toml made.
"""

import dataclasses
import importlib.util
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from sinkring.exporter.machine import Gpu, Machine, describe_machine, find_gpus
from sinkring.models.fetch import cache_folder

State = Literal["ok", "old", "missing", "broken", "none"]

_GIB = 1024**3


@dataclass(frozen=True)
class Wanted:
    """A package that some part of sinkring uses: its name in the registry, what to import, and what for."""

    name: str
    module: str
    purpose: str


@dataclass(frozen=True)
class Range:
    """From which version on sinkring takes a package, and the extra that brings it ("" for a plain install)."""

    minimum: str
    extra: str


@dataclass(frozen=True)
class Package:
    """A wanted package as found. state "broken": its metadata is there and its module is not; "old": below `minimum`."""

    name: str
    version: str | None
    minimum: str
    state: State
    purpose: str
    advice: str


@dataclass(frozen=True)
class Backend:
    """One way to run a bundle or build an engine: the first package found that serves it. `providers` are those of ONNX Runtime."""

    name: str
    package: Package
    providers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Folder:
    """A folder, whether it exists yet, and the bytes free on its disk."""

    path: str
    exists: bool
    free_bytes: int


@dataclass(frozen=True)
class Row:
    """One line of the report: what was looked for, how it stands, what was found, and what to do ("" when nothing)."""

    item: str
    state: State
    found: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """All that `diagnose` found. gpu_note says why `gpus` is empty, or ""."""

    sinkring: str
    machine: Machine
    backends: tuple[Backend, ...]
    packages: tuple[Package, ...]
    gpus: tuple[Gpu, ...]
    gpu_note: str
    cache: Folder

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, tuples, strings and numbers, ready for json.dumps."""
        return dataclasses.asdict(self)

    def rows(self) -> list[Row]:
        """The whole report as lines, in reading order: machine, GPU, backends, packages, cache folder."""
        machine = self.machine
        memory = "unknown" if machine.memory_bytes is None else f"{machine.memory_bytes / _GIB:.1f} GiB"
        rows = [
            Row("sinkring", "ok", self.sinkring, ""),
            Row("Python", "ok", machine.python, ""),
            Row("system", "ok", machine.system, ""),
            Row("CPU", "ok", f"{machine.cpu}, {machine.cores} cores usable", ""),
            Row("memory", "ok", memory, ""),
        ]
        for gpu in self.gpus:
            rows.append(Row("GPU", "ok", f"{gpu.name}, SM {gpu.sm}, driver {gpu.driver}, {gpu.memory_bytes / _GIB:.1f} GiB", ""))
        if not self.gpus:
            rows.append(Row("GPU", "none", self.gpu_note, "not needed to export, to build TensorRT-RTX engines, or to run on the CPU"))
        for backend in self.backends:
            found = _found(backend.package)
            if backend.providers:
                found += f" ({', '.join(backend.providers)})"
            rows.append(Row(f"backend {backend.name}", backend.package.state, found, backend.package.advice))
        rows += [Row(package.name, package.state, _found(package), package.advice) for package in self.packages]
        note = "" if self.cache.exists else ", made when first needed"
        rows.append(Row("cache folder", "ok", f"{self.cache.path}{note}, {self.cache.free_bytes / _GIB:.1f} GiB free", ""))
        return rows


# Several packages may serve one backend: the first found wins, and the first named is the one advised.
BACKENDS: dict[str, tuple[Wanted, ...]] = {
    "onnxruntime": (
        Wanted("onnxruntime", "onnxruntime", "running bundles on the CPU"),
        Wanted("onnxruntime-gpu", "onnxruntime", "running bundles on an NVIDIA GPU with ONNX Runtime"),
    ),
    "tensorrt": (Wanted("tensorrt", "tensorrt", "building and running TensorRT engines"),),
    "tensorrt-rtx": (
        Wanted("tensorrt-rtx-cu13", "tensorrt_rtx", "building TensorRT-RTX engines, which needs no GPU, and running them, which does"),
    ),
    "cuda-bindings": (Wanted("cuda-bindings", "cuda.bindings", "running TensorRT engines: device memory and CUDA graphs"),),
}

PACKAGES: tuple[Wanted, ...] = (
    Wanted("numpy", "numpy", "the runtime"),
    Wanted("torch", "torch", "exporting, and the oracle of `sinkring validate`"),
    Wanted("transformers", "transformers", "reading models, and the oracle of `sinkring validate`"),
    Wanted("onnx", "onnx", "exporting"),
    Wanted("onnx-ir", "onnx_ir", "rewriting graphs while exporting"),
    Wanted("onnxscript", "onnxscript", "torch's ONNX exporter"),
    Wanted("gguf", "gguf", "reading .gguf weights"),
    Wanted("accelerate", "accelerate", "reading .gguf weights"),
    Wanted("safetensors", "safetensors", "reading .safetensors weights"),
    Wanted("polygraphy", "polygraphy", "inspecting engines"),
    Wanted("tokenizers", "tokenizers", "text in and out of a stream"),
    Wanted("jinja2", "jinja2", "chat templates"),
    Wanted("psutil", "psutil", "measuring resident memory"),
    Wanted("rich", "rich", "tables and progress bars"),
    Wanted("matplotlib", "matplotlib", "plots of perplexity and of long runs"),
    Wanted("prometheus-client", "prometheus_client", "the metrics page of `sinkring run --metrics-port`"),
    Wanted("typer", "typer", "the command line"),
)


def diagnose(cache: Path | None = None) -> Diagnosis:
    """Look the machine over. `cache` is where fetched weights are kept, `models.fetch.cache_folder()` if None.

    Reads package metadata, /proc and the answer of nvidia-smi; never raises for something that is missing.
    """
    gpus, gpu_note = find_gpus()
    return Diagnosis(
        sinkring=_version("sinkring") or "not installed",
        machine=describe_machine(),
        backends=tuple(_backend(name, wanted) for name, wanted in BACKENDS.items()),
        packages=tuple(check_package(wanted) for wanted in PACKAGES),
        gpus=gpus,
        gpu_note=gpu_note,
        cache=_folder(cache or cache_folder()),
    )


def check_package(wanted: Wanted, range_: Range | None = None) -> Package:
    """How `wanted` stands here against `range_` (default: the one sinkring asks for), with advice unless it is fine."""
    range_ = range_ or wanted_ranges().get(wanted.name, Range("0", ""))
    version = _version(wanted.name)
    state: State = "ok"
    if version is None:
        state = "missing"
    elif not _importable(wanted.module):
        state = "broken"
    elif _release(version) < _release(range_.minimum):
        state = "old"
    return Package(wanted.name, version, range_.minimum, state, wanted.purpose, _advice(wanted, range_, state))


def wanted_ranges() -> dict[str, Range]:
    """What sinkring's metadata asks of each package, by name. Of several extras that bring a package the first counts."""
    try:
        lines = metadata.requires("sinkring") or []
    except metadata.PackageNotFoundError:
        return {}
    ranges: dict[str, Range] = {}
    for line in lines:
        if match := re.match(r"(?P<name>[\w.-]+?)\s*>=\s*(?P<minimum>[\d.]+)(.*extra == ['\"](?P<extra>[\w-]+)['\"])?", line):
            ranges.setdefault(match["name"], Range(match["minimum"], match["extra"] or ""))
    return ranges


def _backend(name: str, candidates: tuple[Wanted, ...]) -> Backend:
    checked = [check_package(wanted) for wanted in candidates]
    package = next((package for package in checked if package.state != "missing"), checked[0])
    providers = _onnxruntime_providers() if name == "onnxruntime" and package.state in ("ok", "old") else ()
    return Backend(name, package, providers)


def _onnxruntime_providers() -> tuple[str, ...]:
    """The CPU provider is part of the library, each other one a shared library beside it; to ask ONNX Runtime would mean loading it."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return ()
    libraries = (Path(spec.origin).parent / "capi").glob("*onnxruntime_providers_*")
    names = {re.sub(r"^.*onnxruntime_providers_([a-z_]+)\..*$", r"\1", library.name) for library in libraries}
    return ("cpu", *sorted(names - {"shared"}))


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers before any suffix, "2.13.0+cpu" -> (2, 13); without trailing zeros, so that 2.0 equals 2.0.0."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _advice(wanted: Wanted, range_: Range, state: State) -> str:
    if state == "ok":
        return ""
    install = f"'sinkring[{range_.extra}]'" if range_.extra else "sinkring"
    if state == "old":
        install = f"--upgrade {install}"
    if state == "broken":
        install = f"--force-reinstall --no-deps {wanted.name}"
    return f"for {wanted.purpose}: pip install {install}"


def _found(package: Package) -> str:
    if package.version is None:
        return f"not installed, needs {package.minimum} or newer"
    if package.state == "old":
        return f"{package.version}, needs {package.minimum} or newer"
    if package.state == "broken":
        return f"{package.version} is recorded, its module is not there"
    return package.version


def _folder(path: Path) -> Folder:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    return Folder(str(path), path.is_dir(), shutil.disk_usage(there).free)
