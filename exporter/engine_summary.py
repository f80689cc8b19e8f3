"""What the report beside an engine says, in one row."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkring.runtime.errors import BundleError

# The builder numbers its kernels: `_gemv_mha_v1_myl0_4` is the fourth of subgraph 0.
_NUMBERING = re.compile(r"_myl\d+_\d+$")


@dataclass(frozen=True)
class EngineSummary:
    """One engine. `updates_in_place` of `updates` caches are written in place; `copies` counts cache-sized copies, `rewrites` those of them
    that write a whole cache anew; `attention` is the fused kernel that reads the caches, or how many products stand in its place;
    scratch_bytes: None if the builder did not say.
    """

    path: str
    role: str
    target: str
    sm: int
    builder_version: str
    layers: int
    updates: int
    updates_in_place: int
    attention: str
    copies: int
    rewrites: int
    kernels: int
    scratch_bytes: int | None
    engine_bytes: int
    build_s: float
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def from_report(cls, report: Mapping[str, Any], where: str) -> "EngineSummary":
        """From the fields of `build.BuildReport`, as its JSON file holds them. Raises BundleError, naming `where`."""
        try:
            layers = report["plan"]["layers"]
            updates = [update for layer in layers for update in layer["updates"]]
            copies = [copy for layer in layers for copy in layer["copies"]]
            return cls(
                path=report["engine_path"],
                role=report["role"],
                target=report["target"],
                sm=report["sm"],
                builder_version=report["builder_version"],
                layers=len(layers),
                updates=len(updates),
                updates_in_place=sum(update["in_place"] for update in updates),
                attention=_attention(layers),
                copies=len(copies),
                rewrites=sum(copy["kind"] == "rewrite" for copy in copies),
                kernels=report["plan"]["kernels"],
                scratch_bytes=report["plan"]["scratch_bytes"],
                engine_bytes=report["engine_bytes"],
                build_s=report["build_s"],
                faults=tuple(report["faults"]),
                warnings=tuple(report["warnings"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{where}: is not a build report ({type(error).__name__}: {error}); build the engine again") from None

    @classmethod
    def read(cls, path: Path) -> "EngineSummary":
        """From a report file. Raises BundleError."""
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: cannot be read ({error}); build the engine again") from None
        return cls.from_report(report, str(path))


def _attention(layers: list[Mapping[str, Any]]) -> str:
    if not layers:
        return "none"
    if all(layer["fused"] for layer in layers):
        return ", ".join(sorted({_NUMBERING.sub("", name) for layer in layers for name in layer["attention"]}))
    counts = sorted({len(layer["attention"]) for layer in layers})
    return f"{' or '.join(map(str, counts))} products a layer"
