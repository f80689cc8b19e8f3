"""bench_bundles: what one or several bundles cost on this machine, measured in turns."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from sinkring.exporter.bench.bandwidth import BandwidthProbe
from sinkring.exporter.bench.session import SAMPLERS, BenchSession
from sinkring.exporter.bench.spread import Spread
from sinkring.exporter.machine import Machine, describe_machine
from sinkring.runtime.errors import InputError
from sinkring.runtime.manifest import Manifest

Progress = Callable[[str, int, int], None]
CADENCE_S = 0.08
_PACKAGES = ("sinkring", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13", "numpy")


@dataclass(frozen=True)
class BundleCost:
    """One bundle. Steps are those of all `batch` rows together, sampled greedily, times in ms.

    step_ms: by position; full_position: that of them at which the ring is full. floor_ms: what reading read_bytes takes at the bandwidth
    of the same round, None on a GPU; bandwidth_share: that over a step of a full ring. host_ms, host_share: of a step with each sampler,
    what is not the graph's run. resident_bytes: what the bundle added to the process, its mapped weights included.
    """

    bundle: str
    weights: str
    batch: int
    sinks_tokens: int
    window_tokens: int
    capacity_slots: int
    chunk: int
    open_seconds: float
    weight_read_bytes: int
    cache_bytes: int
    read_bytes: int
    full_position: int
    step_ms: dict[int, Spread]
    paced_ms: Spread
    floor_ms: Spread | None
    bandwidth_share: Spread | None
    tokens_per_second: float
    prompt_tokens: int
    prefill_tokens_per_second: Spread
    first_token_ms: Spread
    host_ms: dict[str, float]
    host_share: dict[str, float]
    resident_bytes: int


@dataclass(frozen=True)
class Bench:
    """bandwidth: of memory, bytes per second, None where a GPU does the work. process_bytes: resident before any was opened."""

    machine: Machine
    versions: dict[str, str]
    backend: str
    device: str
    threads: int
    rounds: int
    steps: int
    bandwidth: Spread | None
    process_bytes: int
    bundles: tuple[BundleCost, ...]

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclass
class _Samples:
    """What the rounds gave for one bundle; one entry a round but of paced."""

    steps: dict[int, list[np.ndarray]]
    paced: list[np.ndarray]
    prompt: list[tuple[float, float]]
    host: dict[str, list[tuple[float, float]]]


def bench_bundles(
    bundles: Sequence[str | Path],
    *,
    backend: str = "onnxruntime",
    device: str | None = None,
    target: str | None = None,
    threads: int | None = None,
    rounds: int = 10,
    steps: int = 20,
    prompt: int = 512,
    progress: Progress | None = None,
) -> Bench:
    """Measure each bundle and, in the same rounds, the memory bandwidth that bounds it.

    A round times `steps` steps at each position of each bundle, one prompt of `prompt` tokens and a few paced steps; one round before them
    is not counted. Raises InputError for a number out of range or no bundle, and what `open_bundle` and `read_reference_ids` raise.
    """
    for name, value in (("rounds", rounds), ("steps", steps), ("prompt", prompt), ("bundles", len(bundles))):
        if value < 1:
            raise InputError(f"{name}={value}: must be 1 or more")
    for bundle in bundles:
        Manifest.read(Path(bundle))  # a folder that is no bundle is told of before a minute is spent on the others
    options: dict[str, Any] = {name: value for name, value in (("threads", threads), ("device", device)) if value is not None}
    at_work = threads or describe_machine().cores
    process_bytes = int(psutil.Process().memory_info().rss)
    bandwidths: list[float] = []
    with ExitStack() as opened:
        sessions = []
        for bundle in bundles:
            sessions.append(BenchSession(Path(bundle), backend, target, options))
            opened.callback(sessions[-1].close)
        runs_on = sessions[0].decoder.backend.device
        probe = opened.enter_context(BandwidthProbe(at_work)) if runs_on == "cpu" else nullcontext()
        found = [_Samples({at: [] for at in session.positions}, [], [], {name: [] for name in SAMPLERS}) for session in sessions]
        for number in range(rounds + 1):
            if progress:
                progress("measuring", number, rounds + 1)
            counts = number > 0
            if isinstance(probe, BandwidthProbe):
                sample = probe.sample()
                bandwidths += [sample] * counts
            for session, samples in zip(sessions, found, strict=True):
                _one_round(session, samples, steps, prompt, counts)
        if progress:
            progress("measuring", rounds + 1, rounds + 1)
        costs = tuple(
            _cost(Path(bundle), session, samples, prompt, bandwidths)
            for bundle, session, samples in zip(bundles, sessions, found, strict=True)
        )
    return Bench(
        machine=describe_machine(),
        versions=_versions(),
        backend=backend,
        device=runs_on,
        threads=at_work,
        rounds=rounds,
        steps=steps,
        bandwidth=Spread.of(bandwidths) if bandwidths else None,
        process_bytes=process_bytes,
        bundles=costs,
    )


def _one_round(session: BenchSession, samples: _Samples, steps: int, prompt: int, counts: bool) -> None:
    for at in session.positions:
        times = session.time_steps(at, steps)
        if counts:
            samples.steps[at].append(times)
    paced = session.time_paced(max(steps // 4, 1), CADENCE_S)
    read = session.time_prompt(prompt)
    host = {name: session.time_host(max(steps // 4, 1), sampling) for name, sampling in SAMPLERS.items()}
    if counts:
        samples.paced.append(paced)
        samples.prompt.append(read)
        for name, entry in host.items():
            samples.host[name].append(entry)


def _cost(bundle: Path, session: BenchSession, samples: _Samples, prompt: int, bandwidths: list[float]) -> BundleCost:
    manifest: Manifest = session.decoder.manifest
    geometry = max((ring.geometry for ring in manifest.rings), key=lambda geometry: geometry.capacity)
    full_ms = [float(np.median(times)) for times in samples.steps[session.full]]
    floor_ms = session.read_bytes / np.array(bandwidths) * 1e3
    prompt = min(prompt, session.longest_prompt)
    whole, outside = (
        {name: float(np.median([entry[place] for entry in entries])) for name, entries in samples.host.items()} for place in (0, 1)
    )
    return BundleCost(
        bundle=str(bundle),
        weights=manifest.weights.format if manifest.weights.format != "fp32" else manifest.dtype,
        batch=manifest.batch,
        sinks_tokens=geometry.sinks_tokens,
        window_tokens=geometry.window_tokens,
        capacity_slots=geometry.capacity,
        chunk=manifest.chunk,
        open_seconds=session.open_seconds,
        weight_read_bytes=session.read_bytes - manifest.cache_bytes,
        cache_bytes=manifest.cache_bytes,
        read_bytes=session.read_bytes,
        full_position=session.full,
        step_ms={at: Spread.of(np.concatenate(times)) for at, times in samples.steps.items()},
        paced_ms=Spread.of(np.concatenate(samples.paced)),
        floor_ms=Spread.of(floor_ms) if bandwidths else None,
        bandwidth_share=Spread.of(floor_ms / full_ms) if bandwidths else None,
        tokens_per_second=manifest.batch / float(np.median(np.concatenate(samples.steps[session.full]))) * 1e3,
        prompt_tokens=prompt,
        prefill_tokens_per_second=Spread.of([prompt / read * 1e3 for read, _ in samples.prompt]),
        first_token_ms=Spread.of([first for _, first in samples.prompt]),
        host_ms=outside,
        host_share={name: outside[name] / whole[name] for name in outside},
        resident_bytes=session.resident_bytes,
    )


def _versions() -> dict[str, str]:
    """Of the packages that are here."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
