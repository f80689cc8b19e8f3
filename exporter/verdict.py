"""What a validation found, and when it counts as passed. Every limit of the proof is in this file, with its reason.

1. Every logit of every step is within the tolerance of the oracle's, and finite.
2. Wherever the oracle's best token is ahead of its second by more than the tolerance, the bundle has the same best token.
3. The error does not grow with the age of the stream.
4. The comparison is able to fail: the oracle with a window one token off, or with a sink missing, is far outside the tolerance.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sinkring.exporter.divergence import Divergence, Region, Span
from sinkring.exporter.machine import Machine
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Manifest, Ring

# Old steps attend to more keys than the first ones, and their rounding is allowed to show it; drift, from angles that lose digits or rows
# that are overwritten too early, is a factor without an upper end. Below this share of the tolerance, 2e-6 of the scale, it is rounding.
GROWTH_LIMIT = 3.0
GROWTH_NOISE = 0.02
# Of weights of 4 and 8 bits. MOST_MOVED: norm of a stored matrix's error over its norm: rounding measures 0.1 for 4 bits, 0.03 for fp8 and
# 0.006 for 8 bits, a matrix in another one's place or with rows in another order 1.4; of blocks taken over it is float32's rounding, of
# those with residuals that of these to 8 bits, 0.0004, and without their residuals it would be 0.08.
# MOST_BEYOND: share of a matrix's weights that may be stored as another number than the nearest of their grid: none measures so, a scale in
# its neighbour's place moves half of them. ROUNDED_KL: mean nats that rounding inputs to int8 may cost (SmolLM2: 0.003).
MOST_MOVED = {"int4": 0.3, "int8": 0.05, "int8-rows": 0.05, "fp8": 0.1, "taken over": 1e-5, "residuals taken over": 1e-3}
MOST_BEYOND = 1e-3
ROUNDED_KL = 0.05


@dataclass(frozen=True)
class Limits:
    """relative: largest |error| that passes, of the largest |logit|. control: how many times that a wrong oracle must be away.

    apart: where rounding leaves room for a wrong oracle inside that, it is enough that it is so many times further away than the right one.
    mean: largest mean |error|, of the largest |logit|, of what rounds so far that its largest error says little; see `validate_rounded`.
    """

    relative: float
    control: float
    mean: float | None = None
    apart: float | None = None

    def control_needed(self, tolerance: float, max_error: float) -> float:
        """Logits that a wrong oracle must be away from a bundle whose largest error against the right one is max_error."""
        needed = self.control * tolerance
        # A bundle made wrong is as near to the wrong oracle, and far from the right one.
        return needed if self.apart is None or not math.isfinite(max_error) else min(needed, self.apart * max_error)


# By dtype of the arithmetic, and of the caches. Past twice the tolerance no bundle passes against both oracles; nor does one, whatever the
# tolerance, that is twice as near to the right one. float16 needs the second: SmolLM2's is 1.6e-3 of the scale off (2.6e-3 with float16
# scores) where tiny models with sharper attention need 1.2e-2, and 1e-2 from an oracle with one sink missing.
LIMITS = {
    # Two float32 runs that add the same numbers in another order differ by rounding, about 1e-7 of a value at each of some ten operations
    # in each of tens of layers: 1e-5 at worst. SmolLM2 (30 layers, logits up to 42, S=4, W=256, 1000 steps) measures at most 3.5e-6 of the
    # scale, and 1e-2 of it with one sink missing, 3e-2 with the oldest token of the window missing: the limit lies between.
    ("float32", "float32"): Limits(relative=1e-4, control=10.0),
    # float16 rounds each key and value by up to 2**-12 of itself: a score of 20, a sum of tens of products, by some 1e-3, and a token's
    # weight by that share of it, in each layer. The same SmolLM2 measures at most 1.1e-3 of the scale, tiny models with sharper attention
    # 2.1e-3. It is an error of the numbers, not of the graph: the limit is thirty times as far, and a wrong oracle as near as it can be.
    ("float32", "float16"): Limits(relative=3e-3, control=2.0, apart=2.0),
    # Each product's result is rounded to float16, by up to 2**-11 of itself, in each layer; the oracle has the same rounded weights. Tiny
    # models measure up to 8e-3 of the scale, transformers' own float16 up to ten times as much.
    ("float16", "float16"): Limits(relative=1.2e-2, control=2.0, apart=2.0),
    ("float16", "float32"): Limits(relative=1.2e-2, control=2.0, apart=2.0),
    # bfloat16 has 8 bits where float16 has 11: its roundings are 2**3 times as far, and so are the limits. A wrong oracle is nearer than
    # that; it is held against the same graphs without these roundings, under the limits of the types that are left.
    ("float32", "bfloat16"): Limits(relative=2.4e-2, control=0.0, mean=3e-3),
    ("float16", "bfloat16"): Limits(relative=2.4e-2, control=0.0, mean=3e-3),
    ("bfloat16", "float32"): Limits(relative=9.6e-2, control=0.0, mean=1.2e-2),
    ("bfloat16", "float16"): Limits(relative=9.6e-2, control=0.0, mean=1.2e-2),
    ("bfloat16", "bfloat16"): Limits(relative=9.6e-2, control=0.0, mean=1.2e-2),
}
# Mean error against that of eager PyTorch in the same dtype, which rounds as often and sometimes more: two such runs differ by chance.
EAGER_SHARE = 1.25
# Steps whose largest error may be past the limit all the same: a router that chooses another expert, as eager PyTorch's in bfloat16 does at
# other steps, moves one step's logits as far as experts differ.
MOST_PAST = 0.02


@dataclass(frozen=True)
class Run:
    """One pass over the ids. kind: "decode" (T = 1) or "chunks" (mixed lengths). targets: those that share the graphs, by file name."""

    kind: str
    targets: tuple[str, ...]
    graphs: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} ({', '.join(self.targets)})"


@dataclass(frozen=True)
class Growth:
    """young, old: mean of the steps' largest errors (logits), while filling and in the last span reached. ratio: old / young."""

    run: str
    young: float
    old: float
    ratio: float
    grows: bool


@dataclass(frozen=True)
class Control:
    """A wrong oracle against the bundle. max_error: of the run that came nearest to it, over steps start .. stop-1; must pass `needed`."""

    name: str
    run: str
    start: int
    stop: int
    max_error: float
    needed: float

    @property
    def told_apart(self) -> bool:
        return self.max_error > self.needed


@dataclass(frozen=True)
class Validation:
    """The result of `validate_bundle`. regions: one row per run and age. failures: a line per fault, empty if passed.

    scale: the oracle's largest |logit|; tolerance: largest |error| that passes, in logits. ids_sha256: of the ids as little-endian int64.
    weights: the format of weights in blocks. quantized: of a bundle with such weights, or in bfloat16, the rows of the file as it runs, see
    `validate_blocks` and `validate_rounded`.
    notes: what this validation could not see. versions: packages of this run; made_with: those of the export.
    """

    bundle: str
    model: str
    model_sha256: str
    policy: str
    dtype: str
    cache_dtype: str
    rings: tuple[Ring, ...]
    batch: int
    chunk: int
    steps: int
    ids: str
    ids_sha256: str
    scale: float
    tolerance: float
    runs: tuple[Run, ...]
    regions: tuple[Region, ...]
    growth: tuple[Growth, ...]
    controls: tuple[Control, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    made_with: dict[str, str]
    machine: Machine
    weights: str = "fp32"
    quantized: tuple[Region, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> str:
        """The whole result, with `passed`. A figure that is not finite is null."""
        return json.dumps({"passed": self.passed, **plain(dataclasses.asdict(self))}, indent=2, allow_nan=False) + "\n"


def find_limits(where: Path, manifest: Manifest) -> Limits:
    """Raises UnsupportedError for dtypes that no limits are known for; `where` is named in it."""
    dtypes = (manifest.dtype, manifest.cache_dtype)
    if dtypes not in LIMITS:
        known = ", ".join(f"{dtype} with {cache} caches" for dtype, cache in LIMITS)
        raise UnsupportedError(f"{where}: no tolerance is known for dtype {dtypes[0]} with {dtypes[1]} caches, only for {known}")
    return LIMITS[dtypes]


def measure_growth(run: str, divergence: Divergence, spans: tuple[Span, ...], tolerance: float) -> Growth | None:
    """None before the first overwrite, or if a step is not finite (which is a failure of its own)."""
    if len(spans) < 2 or not divergence.finite.all():
        return None
    # Means of the steps' maxima: a single maximum depends on how many steps a span has.
    young, old = (float(divergence.max_error[span.start : span.stop].mean()) for span in (spans[0], spans[-1]))
    ratio = old / young if young else math.inf if old else 1.0
    return Growth(run, young, old, ratio, grows=ratio > GROWTH_LIMIT and old > GROWTH_NOISE * tolerance)


def judge_control(name: str, measured: dict[str, Divergence], needed: float) -> Control:
    """measured: by run, the figures against the wrong oracle; the nearest must be further from it than `needed`.

    A step that is not finite tells nothing apart.
    """
    nearest = min(measured, key=lambda run: _finite_max(measured[run]))
    figures = measured[nearest]
    stop = figures.first + len(figures.expected)
    return Control(name, nearest, figures.first, stop, _finite_max(figures), needed)


def find_failures(
    regions: tuple[Region, ...], growth: tuple[Growth, ...], controls: tuple[Control, ...], tolerance: float, scale: float
) -> tuple[str, ...]:
    """One line per fault, the gravest first."""
    lines = []
    for row in regions:
        where = f"{row.run}, {row.region} (positions {row.start}..{row.stop - 1})"
        if row.non_finite_steps:
            lines.append(f"{where}: {row.non_finite_steps} of {row.steps} steps have logits that are NaN or infinite")
        elif row.max_error > tolerance:
            lines.append(
                f"{where}: max error {row.max_error:.3g} at position {row.max_error_position}, mean {row.mean_error:.3g}, tolerance "
                f"{tolerance:.3g}; the first step past it is position {row.first_divergence}; a tolerance of {row.max_error:.3g}, "
                f"{row.max_error / scale:.2g} of the largest logit, would pass"
            )
        if row.top1_decided is not None and row.top1_decided < 1:
            wrong = round((1 - row.top1_decided) * row.decided_steps)
            lines.append(
                f"{where}: the best token differs in {wrong} of the {row.decided_steps} steps where the oracle's is ahead by more than "
                f"{tolerance:.3g}; all must agree"
            )
    lines += grown_lines(growth)
    for control in controls:
        if control.told_apart:
            continue
        if any(row.run == control.run and (row.non_finite_steps or row.max_error > tolerance) for row in regions):
            if control.max_error <= tolerance:
                lines.append(
                    f"{control.run}: behaves as if made with {control.name} (error {control.max_error:.3g} against such an oracle)"
                )
        else:
            lines.append(
                f"control {control.name}: is only {control.max_error:.3g} away from the bundle ({control.run}), expected more than "
                f"{control.needed:.3g}: this text can't tell a wrong window or sink from a right one; validate with more steps"
            )
    return tuple(lines)


def grown_lines(growth: tuple[Growth, ...]) -> list[str]:
    return [
        f"{found.run}: the error grows with age, from {found.young:.3g} a step while filling to {found.old:.3g} at the end, "
        f"{found.ratio:.2g} times; at most {GROWTH_LIMIT:g} times is rounding"
        for found in growth
        if found.grows
    ]


def _finite_max(figures: Divergence) -> float:
    finite = figures.max_error[figures.finite]
    return float(np.max(finite)) if finite.size else 0.0


def plain(value: Any) -> Any:
    """For JSON, which has neither NaN nor infinity: a figure that is not finite becomes None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
