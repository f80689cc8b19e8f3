"""The tests marked gpu, then one table of what runs on this machine's GPU: parity with eager PyTorch, speed, bytes and memory bandwidth, by
backend and dtype.

SmolLM2-135M, exported once for each dtype and kept in bundles/; TensorRT engines are built for this GPU. Parity is over 700 tokens of real
text, past the second wrap of the ring, in chunks and then token by token. A step's time is a whole `stream.feed` of one token, logits on
the host included: back to back, and at a cadence of one in 80 ms, when the GPU may have gone to sleep in between. `stream.extend` samples
on the device where an engine can, and must pick the tokens that `generate` picks.

With --dry-run all of this runs on a machine without a GPU, on a tiny model and on doubles of the GPU's libraries: it proves the script, and
no figure is one of a GPU.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinkring.exporter import build_engine, export_decoder
from sinkring.exporter.bench.read_bytes import step_read_bytes
from sinkring.exporter.cli_output import note, print_table
from sinkring.exporter.engine_builder import check_sm, load_builder
from sinkring.exporter.expected_logits import Expected, compute_expected
from sinkring.exporter.export import DTYPES
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.exporter.verdict import find_limits
from sinkring.runtime import Manifest, SinkringError, Stream, open_bundle
from sinkring.runtime.backends import onnxruntime_cuda
from sinkring.runtime.backends.cuda import Device
from sinkring.runtime.backends.engine import MODULES as ENGINE_MODULES
from sinkring.runtime.backends.onnxruntime_cuda import PROVIDER
from sinkring.runtime.errors import DependencyError

ROOT = Path(__file__).resolve().parents[1]
MODEL, BUNDLES = "smollm2", ROOT / "bundles"
PARITY_TOKENS = 700
CADENCE_S = 0.08
EXTENDED_TOKENS = 256
TOP_K = 50
BANDWIDTH_BYTES = 1 << 30
_LINE_BYTES = 1 << 20

# name of the row -> backend and options of open_bundle
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensorrt-rtx": ("tensorrt-rtx", {}),
    "tensorrt": ("tensorrt", {}),
    "onnxruntime cuda": ("onnxruntime", {"device": "cuda"}),
}


@dataclass(frozen=True)
class Row:
    """error: largest |logit - oracle's|. extend_agrees: whether it picked what `generate` did. device_bytes: what opening took on the GPU,
    grown_bytes: what running took beyond. Times in ms.
    """

    backend: str
    dtype: str
    error: float
    tolerance: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    extend_tokens_per_s: float
    extend_agrees: bool
    p50_ms: float
    p99_ms: float
    cadence_p50_ms: float
    cadence_p99_ms: float
    bandwidth_share: float
    cache_bytes: int
    device_bytes: int
    grown_bytes: int

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance and self.extend_agrees


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="timed steps back to back (%(default)s)")
    parser.add_argument("--cadence-steps", type=int, default=100, help="timed steps, one in 80 ms (%(default)s)")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which no further row is begun (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: a tiny model, on doubles")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    args = parser.parse_args(arguments)
    if not args.dry_run:
        return check(args)
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    from gpu_dry_run import stand_ins

    with stand_ins(sys.modules[__name__]):
        return check(args)


def check(args: argparse.Namespace) -> int:
    """Everything, and the exit status: 0 if all that could be run passed, 1 if something failed, 2 without a GPU."""
    began = time.monotonic()
    try:
        device = Device("gpu_check", extra="tensorrt-rtx")
    except SinkringError as error:
        note(f"gpu_check: {error}; nothing was run")
        return 2
    tests_pass = run_tests()
    bandwidth = measure_bandwidth(device, BANDWIDTH_BYTES)
    rows, left_out = [], []
    for dtype in DTYPES:
        for name, (backend, options) in BACKENDS.items():
            try:
                if time.monotonic() - began > args.budget:
                    raise TimeoutError(f"the budget of {args.budget:.0f} s is used up")
                note(f"{name}, {dtype}")
                bundle = prepare(dtype, backend, device.sm)
                rows.append(measure(bundle, name, backend, options, oracle(bundle), device, bandwidth, args.steps, args.cadence_steps))
            except (SinkringError, TimeoutError) as error:
                left_out.append(f"{name}, {dtype}: left out: {error}")
    report(rows, left_out, device, bandwidth, tests_pass, args)
    device.close()
    return 0 if tests_pass and rows and all(row.passed for row in rows) else 1


def run_tests() -> bool:
    """The tests marked gpu, in this process; what they say goes to stderr. Whether all that ran passed."""
    with contextlib.redirect_stdout(sys.stderr):
        return pytest.main(["-q", "-n0", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests" / "parity" / "test_gpu.py")]) == 0


def prepare(dtype: str, backend: str, sm: int) -> Path:
    """The bundle, with engines if the backend runs engines. What the backend lacks is found out before minutes are spent on a bundle."""
    if backend in ENGINE_MODULES:
        trt = load_builder(backend)
        if backend == "tensorrt-rtx":
            check_sm(trt, backend, sm)
    elif PROVIDER not in onnxruntime_cuda.ort.get_available_providers():
        raise DependencyError(f"this onnxruntime has no {PROVIDER}: pip uninstall onnxruntime, then pip install 'sinkring[gpu]'")
    bundle = BUNDLES / f"gpu-check-{dtype}"
    if not bundle.exists():
        export_decoder(MODEL, bundle, dtype=dtype)
    if backend in ENGINE_MODULES and not any((engine.target, engine.sm) == (backend, sm) for engine in Manifest.read(bundle).engines):
        build_engine(bundle, backend, [sm], sample_top_k=TOP_K)
    return bundle


def oracle(bundle: Path, known: dict[str, tuple[np.ndarray, Expected]] = {}) -> tuple[np.ndarray, Expected]:  # noqa: B006  # a cache
    """Token ids and the oracle's logits, once for each dtype: it computes in float32 with the weights as that dtype rounds them."""
    manifest = Manifest.read(bundle)
    key = f"{manifest.model.source_sha256} {manifest.dtype}"
    if key not in known:
        ids = read_reference_ids(bundle, manifest, PARITY_TOKENS).ids
        known[key] = ids, compute_expected(str(bundle), manifest, ids, None, lambda *_: None)
    return known[key]


def measure(
    bundle: Path,
    name: str,
    backend: str,
    options: dict[str, Any],
    expected: tuple[np.ndarray, Expected],
    device: Device,
    bandwidth: float,
    steps: int,
    cadence_steps: int,
) -> Row:
    """One row. `bandwidth`: bytes per second that this GPU reads and writes."""
    ids, right = expected
    before = device.free_bytes()
    with open_bundle(bundle, backend, verify=False, **options) as decoder, decoder.stream() as stream:
        opened = device.free_bytes()
        error = parity(stream, ids, right.logits)
        prefill_s = timed(lambda: stream.feed(ids[: 4 * decoder.manifest.chunk]))
        back_to_back = np.array([timed(lambda token=int(token): stream.feed([token])) for token in tokens(ids, steps)])
        extend_s, agrees = extend(stream, ids[: decoder.manifest.chunk])
        cadence = np.array(list(at_cadence(stream, tokens(ids, cadence_steps))))
        step_s = float(np.median(back_to_back))
        return Row(
            backend=name,
            dtype=decoder.manifest.dtype,
            error=error,
            tolerance=find_limits(bundle, decoder.manifest).relative * right.scale,
            prefill_tokens_per_s=4 * decoder.manifest.chunk / prefill_s,
            decode_tokens_per_s=1 / step_s,
            extend_tokens_per_s=EXTENDED_TOKENS / extend_s,
            extend_agrees=agrees,
            p50_ms=1e3 * step_s,
            p99_ms=1e3 * float(np.percentile(back_to_back, 99)),
            cadence_p50_ms=1e3 * float(np.median(cadence)),
            cadence_p99_ms=1e3 * float(np.percentile(cadence, 99)),
            bandwidth_share=step_read_bytes(bundle, decoder.manifest, backend) / step_s / bandwidth,
            cache_bytes=decoder.cache_bytes,
            device_bytes=before - opened,
            grown_bytes=opened - device.free_bytes(),
        )


def parity(stream: Stream, ids: np.ndarray, right: np.ndarray) -> float:
    """Largest |error| over all of ids, the first half in chunks, the rest token by token; infinite for a logit that is not finite."""
    half = len(ids) // 2
    worst = [np.abs(stream.feed(ids[:half], all_logits=True) - right[:half]).max()]
    worst += [np.abs(stream.feed(ids[at : at + 1]) - right[at]).max() for at in range(half, len(ids))]
    return float(np.max(worst)) if np.isfinite(worst).all() else float("inf")


def extend(stream: Stream, prompt: np.ndarray) -> tuple[float, bool]:
    """Seconds of EXTENDED_TOKENS sampled tokens, and whether they are those of `generate`."""
    picked: list[list[int]] = []

    def sample(on_device: bool) -> None:
        sampling = {"temperature": 0.8, "top_k": TOP_K, "seed": 1}
        if on_device:
            picked.append(stream.extend(EXTENDED_TOKENS, **sampling).tolist())
        else:
            picked.append(list(stream.generate(EXTENDED_TOKENS, **sampling, stop_ids=())))

    seconds = []
    for on_device in (True, False):
        stream.reset()
        stream.feed(prompt)
        seconds.append(timed(lambda on_device=on_device: sample(on_device)))
    return seconds[0], picked[0] == picked[1]


def tokens(ids: np.ndarray, count: int) -> np.ndarray:
    return np.resize(ids, count)


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def at_cadence(stream: Stream, ids: np.ndarray, cadence_s: float = CADENCE_S) -> Iterator[float]:
    """Seconds of each step, begun one in cadence_s."""
    due = time.perf_counter()
    for token in ids:
        time.sleep(max(0.0, due - time.perf_counter()))
        yield timed(lambda token=int(token): stream.feed([token]))
        due += cadence_s


def measure_bandwidth(device: Device, size_bytes: int, rounds: int = 20) -> float:
    """Bytes per second read and written while copying `size_bytes`, best of `rounds`."""
    to, source = device.allocate(size_bytes, "bandwidth"), device.allocate(size_bytes, "bandwidth")
    lines = size_bytes // _LINE_BYTES

    def copy() -> None:
        device.copy_boxes(to, _LINE_BYTES, lines, source, _LINE_BYTES, lines, (_LINE_BYTES, lines, 1))
        device.synchronize()

    return 2 * size_bytes / min(timed(copy) for _ in range(rounds))


def report(rows: list[Row], left_out: list[str], device: Device, bandwidth: float, tests_pass: bool, args: argparse.Namespace) -> None:
    machine = describe_machine()
    if args.json:
        facts = {"gpu": device.name, "sm": device.sm, "bandwidth_bytes_per_s": bandwidth, "machine": dataclasses.asdict(machine)}
        said = {"dry_run": args.dry_run, "tests_pass": tests_pass, "rows": [dataclasses.asdict(row) for row in rows], "left_out": left_out}
        print(json.dumps({**facts, **said}))
        return
    dry = "dry run on doubles, no figure is one of a GPU: " if args.dry_run else ""
    print_table(
        [
            *(
                "backend",
                "dtype",
                "max |Δlogit|",
                "tolerance",
                "prefill tokens/s",
                "tokens/s",
                "extend tokens/s",
                "p50 ms",
                "p99 ms",
                "p50 ms at 80 ms",
            ),
            *("p99 ms at 80 ms", "of bandwidth", "cache bytes", "GPU bytes", "grown bytes", ""),
        ],
        [
            [
                *(row.backend, row.dtype, f"{row.error:.2e}", f"{row.tolerance:.2e}", round(row.prefill_tokens_per_s)),
                *(
                    round(row.decode_tokens_per_s),
                    round(row.extend_tokens_per_s),
                    *(f"{value:.3f}" for value in (row.p50_ms, row.p99_ms, row.cadence_p50_ms)),
                ),
                *(f"{row.cadence_p99_ms:.3f}", f"{row.bandwidth_share:.0%}", row.cache_bytes, row.device_bytes, row.grown_bytes),
                "ok" if row.passed else "FAILED",
            ]
            for row in rows
        ],
        title=f"{dry}{device.name}, sm={device.sm}, copies {bandwidth / 1e9:.0f} GB/s; {machine.cpu}",
    )
    print(f"the tests marked gpu {'passed' if tests_pass else 'FAILED'}")
    for line in left_out:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
