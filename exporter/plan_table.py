"""One bundle's plans for many GPUs: what a builder makes of each graph for each compute capability, side by side, and what changed since.

An engine that is refused, by the builder or for its plan, is a row like any other, with the reason. Nothing is written into the bundle.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sinkring.exporter.build import ENGINES_FOLDER, build_engine, graphs_to_build
from sinkring.exporter.engine_summary import EngineSummary
from sinkring.runtime.errors import BuildError, UnsupportedError
from sinkring.runtime.manifest import MANIFEST_NAME, Manifest, Role

# Called with what is built next, how many engines are done, and how many there are in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PlanRow:
    """One graph for one GPU. sm: 10 x major + minor; tokens: longest call; kernels_per_layer: the median, without the last layer, which
    ends with the graph. scratch_bytes is None when the builder did not say. refusal: why there is no engine, or nothing; all the rest is
    empty when the builder itself refused.
    """

    sm: int
    dtype: str
    role: Role
    tokens: int
    in_place: str = ""
    attention: str = ""
    copies: int = 0
    kernels: int = 0
    kernels_per_layer: float = 0.0
    scratch_bytes: int | None = None
    engine_bytes: int = 0
    refusal: str = ""


def plan_rows(bundle: Path, sms: Sequence[int], *, target: str = "tensorrt-rtx", progress: Progress | None = None) -> list[PlanRow]:
    """Build each of `bundle`'s graphs for each of `sms` and read the plans; the engines themselves are thrown away.

    Raises what `build_engine` raises, but for BuildError and UnsupportedError, which become a row's refusal.
    """
    manifest = Manifest.read(bundle)
    wanted = graphs_to_build(manifest, target, sms)
    rows, weights = [], manifest.weights.format
    dtype = manifest.dtype if weights == "fp32" else f"{manifest.dtype}, weights {weights}"
    with tempfile.TemporaryDirectory(dir=bundle.parent, prefix=f".{bundle.name}-plans-") as folder:
        copy = Path(folder) / "bundle"
        shutil.copytree(bundle, copy, copy_function=_link, ignore=shutil.ignore_patterns(ENGINES_FOLDER))
        for number, (graph, sm) in enumerate(wanted):
            if progress is not None:
                progress(f"{graph.role} sm{sm}", number, len(wanted))
            # One graph at a time: the other is built even if this one is refused. A file of its own, not the link.
            only = dataclasses.replace(manifest, graphs=(graph,), engines=())
            (copy / MANIFEST_NAME).unlink()
            (copy / MANIFEST_NAME).write_text(only.to_json(), encoding="utf-8")
            rows.append(_row(copy, dtype, graph.role, graph.tokens, target, sm))
            shutil.rmtree(copy / ENGINES_FOLDER, ignore_errors=True)
    return rows


def _row(bundle: Path, dtype: str, role: Role, tokens: int, target: str, sm: int) -> PlanRow:
    refusal = ""
    try:
        build_engine(bundle, target, [sm])
    except (BuildError, UnsupportedError) as error:
        refusal = str(error)
    report = next((bundle / ENGINES_FOLDER).rglob("*.json"), None)
    if report is None:
        return PlanRow(sm, dtype, role, tokens, refusal=refusal)
    found = EngineSummary.read(report)
    plan = json.loads(report.read_text(encoding="utf-8"))["plan"]
    layers = plan["layers"][:-1] or plan["layers"]
    return PlanRow(
        sm=sm,
        dtype=dtype,
        role=role,
        tokens=tokens,
        in_place=f"{found.updates_in_place}/{found.updates}",
        attention=found.attention,
        copies=found.copies,
        kernels=found.kernels,
        kernels_per_layer=median(layer["kernels"] for layer in layers),
        scratch_bytes=plan["scratch_bytes"],
        engine_bytes=found.engine_bytes,
        refusal=refusal,
    )


def _link(source: str, copy: str) -> None:
    """Weights are hundreds of megabytes, and only read."""
    try:
        os.link(source, copy)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, copy)


def differences(kept: Iterable[PlanRow], found: Iterable[PlanRow]) -> list[str]:
    """One line for each figure that is not as it was kept, each row that is new, and each that is gone. Empty when nothing changed.

    The sizes of engines and the words of a refusal, which name nodes by number, change with every builder and are passed over.
    """

    def keyed(rows: Iterable[PlanRow]) -> dict[str, PlanRow]:
        return {f"sm{row.sm} {row.dtype} {row.role} T={row.tokens}": row for row in rows}

    before, after = keyed(kept), keyed(found)
    lines = [f"{key}: is gone" for key in before.keys() - after.keys()] + [f"{key}: is new" for key in after.keys() - before.keys()]
    for key in before.keys() & after.keys():
        for name, was in _figures(before[key]).items():
            now = _figures(after[key])[name]
            if was != now:
                lines.append(f"{key}: {name} was {was!r}, is {now!r}")
    return sorted(lines)


def _figures(row: PlanRow) -> dict[str, object]:
    figures = dataclasses.asdict(row) | {"refusal": "refused" if row.refusal else "built"}
    del figures["engine_bytes"]
    return figures
