"""sinkring beside the runtimes that people would use instead: the same weights, the same window, the same machine, in turns.

Each peer runs in a process and an environment of its own (`peers/`), and they take turns, so that what the machine does to one it does to
all; a ratio is the median over the rounds of the ratio within a round. Steps are greedy ones from a cache that holds `--window` tokens,
prefill is of `--prompt` tokens from an empty cache. What a peer does past its context is tried and recorded.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from sinkring.exporter.bench.bandwidth import BandwidthProbe
from sinkring.exporter.bench.spread import Spread
from sinkring.exporter.cli_output import note, print_table
from sinkring.exporter.machine import describe_machine
from sinkring.exporter.reference_text import read_reference_ids
from sinkring.runtime import Manifest

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import weights
from environments import environments_folder, python_of
from interleave import PeerFault, PeerProcess, turn


@dataclass(frozen=True)
class Variant:
    """environment: see `environments.py`. program: the file in peers/ and its arguments. model: makes the weights, returns their path."""

    environment: str
    program: tuple[str, ...]
    model: Callable[[int, weights.Say], Path]


VARIANTS = {
    "sinkring fp32": Variant("sinkring", ("peer_sinkring.py",), lambda window, say: weights.bundle("fp32", window, say)),
    "sinkring int8": Variant("sinkring", ("peer_sinkring.py",), lambda window, say: weights.bundle("int8", window, say)),
    "sinkring int8-rows": Variant(
        "sinkring", ("peer_sinkring.py",), lambda window, say: weights.bundle("int8-rows", window, say, chunk=256)
    ),
    "sinkring int4": Variant("sinkring", ("peer_sinkring.py",), lambda window, say: weights.bundle("int4", window, say)),
    "transformers dynamic": Variant("sinkring", ("peer_transformers.py", "dynamic"), lambda _, say: weights.hugging_face(say)),
    "transformers static": Variant("sinkring", ("peer_transformers.py", "static"), lambda _, say: weights.hugging_face(say)),
    "genai fp32": Variant("genai", ("peer_genai.py",), lambda _, say: weights.genai("fp32", say)),
    "genai int4": Variant("genai", ("peer_genai.py",), lambda _, say: weights.genai("int4", say)),
    "llama.cpp F32": Variant("llama", ("peer_llama.py",), lambda _, say: weights.llama_float("F32", say)),
    "llama.cpp F16": Variant("llama", ("peer_llama.py",), lambda _, say: weights.llama_float("F16", say)),
    "llama.cpp Q4_1": Variant("llama", ("peer_llama.py",), lambda _, say: weights.gguf(say)),
    "llama.cpp Q4_1 flash": Variant("llama", ("peer_llama.py", "flash"), lambda _, say: weights.gguf(say)),
    "OpenVINO": Variant("openvino", ("peer_openvino.py", "PA"), lambda _, say: weights.gguf(say)),
    "OpenVINO SDPA": Variant("openvino", ("peer_openvino.py", "SDPA"), lambda _, say: weights.gguf(say)),
    "OpenVINO eviction": Variant("openvino", ("peer_openvino.py", "evict"), lambda _, say: weights.gguf(say)),
    "ExecuTorch fp32": Variant("executorch", ("peer_executorch.py",), lambda window, say: weights.executorch("fp32", window, say)),
    "ExecuTorch 8da4w": Variant("executorch", ("peer_executorch.py",), lambda window, say: weights.executorch("8da4w", window, say)),
}
# One figure each for weights that were rounded: 4 pieces of 512 tokens of the same text.
PIECES, PIECE_TOKENS = 4, 512


@dataclass
class Measured:
    """What was found of one variant. decode_ms, prefill_ms: one list a round, in the order of the rounds."""

    versions: dict[str, str] = field(default_factory=dict)
    load_seconds: float | None = None
    decode_ms: list[list[float]] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    resident: dict[str, int] = field(default_factory=dict)
    perplexity: float | None = None
    beyond: str | None = None
    faults: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help=f"of {', '.join(VARIANTS)}; default: all")
    parser.add_argument("--prepare", action="store_true", help="make environments and weights, measure nothing")
    parser.add_argument("--window", type=int, default=1024, help="tokens in the cache (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="of decode steps (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="in a round (%(default)s)")
    parser.add_argument("--prefill-rounds", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--prompt", type=int, default=900, help="tokens of a prefill (%(default)s)")
    parser.add_argument("--perplexity", action="store_true", help="of each variant too")
    parser.add_argument("--beyond", action="store_true", help="try what happens past the context")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    names = args.only or list(VARIANTS)
    measured = {name: Measured() for name in names}
    paths = prepare(names, args.window, measured)
    if args.prepare:
        return 1 if any(entry.faults for entry in measured.values()) else 0
    peers = start(paths, reference_ids(args), args, measured)
    bandwidth: list[float] = []
    measure(peers, args, measured, bandwidth)
    for peer in peers.values():
        peer.stop()
    result = save(args, measured, bandwidth)
    show(result)
    return 0


def prepare(names: list[str], window: int, measured: dict[str, Measured]) -> dict[str, tuple[Path, Path]]:
    """Interpreter and weights of each variant, made if they are not there; what cannot be made is recorded and left out."""
    paths = {}
    for name in names:
        variant = VARIANTS[name]
        try:
            paths[name] = python_of(variant.environment, note), variant.model(window, note)
        except Exception as error:  # a peer that cannot be installed or converted must not keep the others from being measured
            measured[name].faults.append(f"prepare: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
            note(f"{name}: {measured[name].faults[-1]}")
    return paths


def reference_ids(args: argparse.Namespace) -> list[int]:
    bundle = weights.bundle("fp32", args.window, note)
    tokens = max(args.window, args.prompt, PIECES * PIECE_TOKENS)
    return read_reference_ids(bundle, Manifest.read(bundle), tokens).ids.tolist()


def start(
    paths: dict[str, tuple[Path, Path]], ids: list[int], args: argparse.Namespace, measured: dict[str, Measured]
) -> dict[str, PeerProcess]:
    """All peers, loaded."""
    logs = environments_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    peers = {}
    for name, (python, model) in paths.items():
        note(f"loading {name}")
        peer = PeerProcess(python, VARIANTS[name].program, logs / f"{name.replace(' ', '-')}.log")
        began = time.perf_counter()
        try:
            # Steps: those that are timed, two that warm up, and the prompt's end.
            measured[name].versions = peer.ask(
                "load", model=str(model), ids=ids, window=args.window, threads=args.threads, steps=args.steps + 4
            )
            measured[name].load_seconds = round(time.perf_counter() - began, 2)
            peers[name] = peer
        except PeerFault as fault:
            measured[name].faults.append(f"load: {fault}")
            note(f"{name}: {fault}")
            peer.stop()
    if args.perplexity:
        pieces = [ids[first : first + PIECE_TOKENS] for first in range(0, PIECES * PIECE_TOKENS, PIECE_TOKENS)]
        for name, peer in peers.items():
            found = measured[name]
            losses = [attempt(found, "perplexity", lambda piece=piece, peer=peer: peer.ask("losses", piece=piece)) for piece in pieces]
            if all(losses):
                measured[name].perplexity = float(np.exp(np.mean(losses)))
    return peers


def measure(peers: dict[str, PeerProcess], args: argparse.Namespace, measured: dict[str, Measured], bandwidth: list[float]) -> None:
    """All rounds, each of which is saved. Adds to bandwidth what a round finds of the memory's, in bytes per second."""
    with BandwidthProbe(args.threads) as probe:
        for number in range(args.rounds + 1):
            note(f"decode, round {number} of {args.rounds}")
            for name in turn(list(peers), number):
                times = attempt(measured[name], "decode", lambda name=name: peers[name].ask("decode", steps=args.steps))
                # The first round warms up.
                if number and times:
                    measured[name].decode_ms.append(times)
            bandwidth.append(probe.sample())
            for name, peer in peers.items():
                measured[name].resident = peer.resident_bytes()
            save(args, measured, bandwidth)
        for number in range(args.prefill_rounds + 1 if args.prefill_rounds else 0):
            note(f"prefill, round {number} of {args.prefill_rounds}")
            for name in turn(list(peers), number):
                took = attempt(measured[name], "prefill", lambda name=name: peers[name].ask("prefill", tokens=args.prompt))
                if number and took:
                    measured[name].prefill_ms.append(took)
            save(args, measured, bandwidth)
    for name, peer in peers.items():
        if args.beyond:
            measured[name].beyond = attempt(measured[name], "beyond", lambda peer=peer: peer.ask("beyond"))


def attempt(entry: Measured, what: str, call: Callable[[], Any]) -> Any:
    """The answer, or None and an entry among the faults."""
    try:
        return call()
    except PeerFault as fault:
        if f"{what}: {fault}" not in entry.faults:
            entry.faults.append(f"{what}: {fault}")
            note(f"{what}: {fault}")
        return None


def save(args: argparse.Namespace, measured: dict[str, Measured], bandwidth: list[float]) -> dict[str, Any]:
    """All figures so far, in the file that was asked for too: an interrupt loses one round."""
    result = summary(args, measured, bandwidth)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def summary(args: argparse.Namespace, measured: dict[str, Measured], bandwidth: list[float]) -> dict[str, Any]:
    peers = {}
    for name, entry in measured.items():
        peers[name] = {
            **dataclasses.asdict(entry),
            "decode": dataclasses.asdict(Spread.of(np.concatenate(entry.decode_ms))) if entry.decode_ms else None,
            "prefill_tokens_per_s": dataclasses.asdict(Spread.of(args.prompt / np.array(entry.prefill_ms) * 1e3))
            if entry.prefill_ms
            else None,
        }
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": dataclasses.asdict(describe_machine()),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "bandwidth_bytes_per_s": dataclasses.asdict(Spread.of(bandwidth)),
        "peers": peers,
        "decode_ratios": ratios({name: [float(np.median(steps)) for steps in entry.decode_ms] for name, entry in measured.items()}),
        "prefill_ratios": ratios({name: entry.prefill_ms for name, entry in measured.items()}),
    }


def ratios(times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """How many times as long as each sinkring a peer takes: {sinkring: {peer: spread over the rounds}}."""
    found: dict[str, dict[str, Any]] = {}
    for ours in (name for name in times if name.startswith("sinkring") and times[name]):
        found[ours] = {
            name: dataclasses.asdict(Spread.of(np.array(theirs) / np.array(times[ours])))
            for name, theirs in times.items()
            if len(theirs) == len(times[ours]) and name != ours
        }
    return found


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, peer in result["peers"].items():
        decode, prefill, resident = peer["decode"], peer["prefill_tokens_per_s"], peer["resident"]
        rows.append(
            (
                name,
                f"{decode['median']:.2f} ({decode['p25']:.2f} .. {decode['p75']:.2f})" if decode else "",
                f"{prefill['median']:,.0f} ({prefill['p25']:,.0f} .. {prefill['p75']:,.0f})" if prefill else "",
                f"{resident['VmRSS'] / 1e6:,.0f} ({resident['RssAnon'] / 1e6:,.0f})" if resident else "",
                f"{peer['perplexity']:.3f}" if peer["perplexity"] else "",
                "; ".join(filter(None, [peer["beyond"], *peer["faults"]])),
            )
        )
    print_table(("", "decode, ms", "prefill, tokens/s", "resident (own), MB", "perplexity", "past its context; faults"), rows)
    for what in ("decode", "prefill"):
        for ours, theirs in result[f"{what}_ratios"].items():
            line = ", ".join(f"{name} {ratio['median']:.2f} ({ratio['p25']:.2f} .. {ratio['p75']:.2f})" for name, ratio in theirs.items())
            print(f"\n{what}, times {ours}: {line}")
    bandwidth = result["bandwidth_bytes_per_s"]
    print(f"\nmemory bandwidth: {bandwidth['median'] / 1e9:.1f} GB/s ({bandwidth['p25'] / 1e9:.1f} .. {bandwidth['p75'] / 1e9:.1f})")


if __name__ == "__main__":
    sys.exit(main())
