"""SmolLM2-135M from weights to endless text: export, engines, stream past the ring's second wrap, proof against eager PyTorch.

What is already there and up to date is not made again: `scripts/demo` a second time goes straight to the text.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sinkring.runtime import Manifest, SinkringError, open_bundle
from sinkring.runtime.bundle import check_files
from sinkring.runtime.errors import BundleError
from sinkring.runtime.text import IncrementalDecoder, TextCodec

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2"
OPTIONS: dict[str, Any] = {"policy": "streaming", "sinks": 4, "window": 256, "chunk": 64, "batch": 1, "dtype": "fp32"}
TARGET, SMS = "tensorrt-rtx", (89, 120)

# One stream all along: when an answer ends, the next question is fed behind it.
QUESTIONS = (
    "Tell me a long story about a lighthouse keeper who finds a map.",
    "What happens next?",
    "And how did the people of the village take it?",
    "Go on with the story, please.",
)

console = Console()


@dataclass(frozen=True)
class Memory:
    """Resident bytes of this process, and how many of them are its own: the others are mapped files, above all the weights.

    A page of the weights becomes resident when first read, so `resident_bytes` grows with each new word for a while; `own_bytes` must not.
    """

    resident_bytes: int
    own_bytes: int

    @classmethod
    def now(cls) -> "Memory":
        info = psutil.Process().memory_info()
        return cls(info.rss, info.rss - getattr(info, "shared", 0))


@dataclass(frozen=True)
class Streamed:
    """One run of the stream: tokens in it and generated, wall time of the generation in seconds, memory at its start and end."""

    stream_tokens: int
    generated_tokens: int
    seconds: float
    cache_bytes: int
    start: Memory
    end: Memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, default=ROOT / "bundles" / MODEL, help="where the bundle lies or is made (%(default)s)")
    parser.add_argument("--tokens", type=int, default=800, help="length of the stream, past the second wrap of its ring (%(default)s)")
    parser.add_argument("--steps", type=int, default=700, help="tokens to compare with eager PyTorch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")
    args = parser.parse_args()
    try:
        return 0 if demonstrate(args.bundle, args.tokens, args.steps, args.seed) else 1
    except SinkringError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def demonstrate(bundle: Path, tokens: int, steps: int, seed: int) -> bool:
    """Whether the bundle agrees with eager PyTorch."""
    # Exporting and building load torch and TensorRT: done in processes of their own, so that the memory measured is the runtime's alone.
    if reason := why_export(bundle):
        step(f"export {MODEL}: {reason}")
        in_child(export, bundle)
    else:
        step(f"export {MODEL}: up to date")
    if missing := missing_engines(bundle):
        step(f"build engines for SM {', '.join(map(str, missing))} (no GPU needed)")
        in_child(build, bundle, missing)
    else:
        step("build engines: up to date")
    ring = Manifest.read(bundle).rings[0].geometry
    step(f"stream {tokens} tokens through {ring.sinks_tokens} sinks and {ring.slots} ring slots")
    streamed = stream_text(bundle, tokens, seed)
    step(f"validate {steps} steps against eager PyTorch")
    from sinkring.exporter import validate_bundle  # Loads torch: not before the memory has been measured.

    with progress_bar() as show:
        validation = validate_bundle(bundle, steps=steps, progress=show)
    console.print(summary(bundle, streamed, validation))
    for failure in validation.failures:
        print(f"demo: {failure}", file=sys.stderr)
    return validation.passed


def step(text: str) -> None:
    console.print(f"[bold]>> {text}[/bold]", highlight=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar to move with (stage, steps done, steps in all)."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda stage, done, steps: progress.update(task, description=stage, completed=done, total=steps)


def in_child(work: Callable[..., None], *arguments: Any) -> None:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        pool.submit(work, *arguments).result()


def why_export(bundle: Path) -> str:
    """Why the bundle has to be made; "" when it is whole and made by these sources with these options."""
    if not bundle.exists():
        return f"no bundle at {shown(bundle)} yet"
    try:
        check_files(bundle, Manifest.read(bundle))
    except BundleError as error:
        return str(error)
    made_by = made_by_file(bundle)
    if not made_by.is_file() or made_by.read_text(encoding="utf-8").strip() != source_sha256():
        return "the sources or the options have changed since"
    return ""


def export(bundle: Path) -> None:
    from sinkring.exporter import export_decoder

    made_by_file(bundle).unlink(missing_ok=True)
    export_decoder(MODEL, bundle, **OPTIONS, overwrite=True, progress=lambda line: console.print(f"   {line}", highlight=False))
    made_by_file(bundle).write_text(source_sha256() + "\n", encoding="utf-8")


def missing_engines(bundle: Path) -> tuple[int, ...]:
    """Compute capabilities that lack an engine of this TensorRT-RTX for some graph as it is now."""
    manifest = Manifest.read(bundle)
    version = metadata.version("tensorrt-rtx-cu13")
    hashes = {file.path: file.sha256 for file in manifest.files}
    wanted = [(graph.path, hashes[graph.path]) for graph in manifest.graphs if graph.target == TARGET]
    have = {
        (engine.graph_path, engine.graph_sha256, engine.sm)
        for engine in manifest.engines
        if engine.target == TARGET and engine.builder_version == version
    }
    return tuple(sm for sm in SMS if any((*graph, sm) not in have for graph in wanted))


def build(bundle: Path, sms: tuple[int, ...]) -> None:
    from sinkring.exporter import build_engine

    with progress_bar() as show:
        reports = build_engine(bundle, target=TARGET, sm=sms, progress=show)
    for report in reports:
        console.print(f"   {report.engine_path}: {report.engine_bytes / 2**20:.1f} MiB in {report.build_s:.1f} s", highlight=False)


def stream_text(bundle: Path, tokens: int, seed: int) -> Streamed:
    """Ask, answer, ask on, in one stream, until it is `tokens` tokens long; the text is printed as it comes."""
    codec = TextCodec.open(bundle, Manifest.read(bundle).tokenizer)
    with open_bundle(bundle, backend="onnxruntime") as decoder:
        stream = decoder.stream()
        generated, seconds, turn, end_fed = 0, 0.0, 0, False
        start: Memory | None = None
        while stream.position < tokens:
            question = QUESTIONS[turn] if turn < len(QUESTIONS) else QUESTIONS[-1]
            console.print(f"\n[bold cyan]{question}[/bold cyan]", highlight=False)
            stream.feed(codec.chat_turn(question, first=turn == 0, end_fed=end_fed))
            turn, position, answered = turn + 1, stream.position, 0
            text = IncrementalDecoder(codec)
            began = time.perf_counter()
            for token in stream.generate(max_tokens=max(1, tokens - position), temperature=0.8, repetition_penalty=1.1, seed=seed):
                answered += 1
                if start is None and answered == 2:  # The first token came from the prefill graph: now both graphs have run.
                    start = Memory.now()
                sys.stdout.write(text.push(token))
                sys.stdout.flush()
            seconds += time.perf_counter() - began
            # The stop token is not yielded but is part of the stream: the next turn must not bring it along again.
            end_fed = stream.position > position + answered
            generated += answered
            print(text.flush())
        end = Memory.now()
        return Streamed(stream.position, generated, seconds, decoder.cache_bytes, start or end, end)


def summary(bundle: Path, streamed: Streamed, validation: Any) -> Table:
    start, end = streamed.start, streamed.end
    table = Table(show_header=False, title=f"{MODEL}, {OPTIONS['policy']} policy, {OPTIONS['dtype']}")
    for name, value in (
        ("bundle", shown(bundle)),
        (
            "stream",
            f"{streamed.stream_tokens} tokens long, {streamed.generated_tokens} generated; second wrap at {second_wrap_tokens(bundle)}",
        ),
        ("speed", f"{streamed.generated_tokens / streamed.seconds:.1f} tokens/s with ONNX Runtime on this CPU, printing included"),
        ("cache", f"{streamed.cache_bytes:,} bytes, the same at every age"),
        ("resident memory", f"{mebibytes(start.resident_bytes)} at the start, {mebibytes(end.resident_bytes)} at the end"),
        ("without mapped weights", f"{mebibytes(start.own_bytes)} at the start, {mebibytes(end.own_bytes)} at the end"),
        (
            "against eager PyTorch",
            f"{'agrees' if validation.passed else 'DIFFERS'} over {validation.steps} steps: largest logit difference "
            f"{max(region.max_error for region in validation.regions):.2e}, {validation.tolerance:.2e} would pass",
        ),
    ):
        table.add_row(name, value)
    return table


def second_wrap_tokens(bundle: Path) -> int:
    """Length of a stream that has begun to write every ring slot a third time."""
    ring = Manifest.read(bundle).rings[0].geometry
    return ring.sinks_tokens + 2 * ring.slots


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def source_sha256() -> str:
    """Of everything that decides what an export writes: the options, the exporter, the models, and the runtime's part of the contract."""
    files = [
        *(ROOT / "exporter").rglob("*.py"),
        *(ROOT / "models").rglob("*.py"),
        *(ROOT / "runtime" / name for name in ("manifest.py", "ring.py")),
    ]
    digest = hashlib.sha256(repr((MODEL, OPTIONS)).encode())
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT).as_posix()} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def made_by_file(bundle: Path) -> Path:
    """Beside the bundle, as the bundle holds only what its manifest lists."""
    return bundle.with_name(f"{bundle.name}.made-by")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
