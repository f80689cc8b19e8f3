"""Many streams on one bundle for many steps: they join, leave, reset, step in random company, are fed, sampled and rolled back.

At the end every stream's logits are compared with those of a stream of another decoder that was fed, on its own and in one go, all that
this one was given since its last reset; and the memory after the first half of the calls with that at the end. Prints one JSON object;
exit status 1 if a stream is off by more than the tolerance, an address has changed, or memory has grown.

Without --bundle it exports a tiny random Llama with 64 rows.
"""

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
from sinkring.exporter.machine import describe_machine
from sinkring.runtime import Decoder, Stream, open_bundle
from sinkring.runtime.errors import CapacityError

ROWS = 64
# Of the largest logit: float32, sums in another order, as the steps run in the decode graph with all rows and the solo runs in prefill,
# one row in chunks.
TOLERANCE = 1e-4
GROWTH_BYTES = 2 << 20
# A stream this long is reset, so that its solo run stays short.
LONGEST_TOKENS = 2000
# Steps in company are most of the calls; the rest is what may happen between two of them.
EVENTS = {"step": 0.80, "feed": 0.07, "generate": 0.04, "rollback": 0.04, "reset": 0.02, "leave": 0.015, "join": 0.015}


class Soak:
    """The streams, and beside them, in memory that is all touched now, what each was given since its last reset."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self.decoder, self.rng = decoder, np.random.default_rng(seed)
        self.vocab = decoder.manifest.model.vocab_size
        self.streams: list[Stream] = []
        self.said = np.ones((decoder.manifest.batch, LONGEST_TOKENS + 64), np.int32)
        self.counts: Counter[str] = Counter()
        # Stepped at least once before anything is measured, with one stream and with all.
        while self.join():
            pass
        self.step(np.arange(len(self.streams)))

    def run(self, steps: int) -> None:
        names, weights = list(EVENTS), np.array(list(EVENTS.values()))
        for event in self.rng.choice(len(names), steps, p=weights / weights.sum()):
            self.counts[names[event]] += 1
            if names[event] == "join":
                self.join()
            elif names[event] == "step":
                count = int(self.rng.integers(1, len(self.streams) + 1)) if self.streams else 0
                self.step(self.rng.permutation(len(self.streams))[:count])
            elif self.streams:
                index = int(self.rng.integers(len(self.streams)))
                getattr(self, names[event])(index)

    def join(self) -> bool:
        """A new stream, if a row is free."""
        if len(self.streams) == self.decoder.manifest.batch:
            return False
        self.streams.append(self.decoder.stream())
        return True

    def leave(self, index: int) -> None:
        self.streams.pop(index).close()

    def reset(self, index: int) -> None:
        self.streams[index].reset()

    def step(self, chosen: np.ndarray) -> dict[Stream, np.ndarray]:
        tokens = {self.streams[index]: int(self.rng.integers(self.vocab)) for index in chosen}
        for stream, token in tokens.items():
            self._say(stream, [token])
        return self.decoder.step(tokens) if tokens else {}

    def feed(self, index: int) -> None:
        ids = self.rng.integers(0, self.vocab, int(self.rng.integers(1, 21)))
        self._say(self.streams[index], ids)
        self.streams[index].feed(ids)

    def generate(self, index: int) -> None:
        stream = self.streams[index]
        if stream.position:
            for token in stream.generate(3, temperature=1.0, seed=index, stop_ids=()):
                self.said[stream.row, stream.position - 1] = token
            if stream.position > LONGEST_TOKENS:
                stream.reset()

    def rollback(self, index: int) -> None:
        stream = self.streams[index]
        # Several rollbacks in a row can want more than the ring remembers.
        with suppress(CapacityError):
            stream.rollback(int(self.rng.integers(min(self.decoder.slack_tokens, stream.position) + 1)))

    def _say(self, stream: Stream, ids: Any) -> None:
        if stream.position + len(ids) > LONGEST_TOKENS:
            stream.reset()
        self.said[stream.row, stream.position : stream.position + len(ids)] = ids

    def ids_of(self, stream: Stream) -> np.ndarray:
        return self.said[stream.row, : stream.position]


def soak(bundle: Path, steps: int, seed: int = 0, threads: int = 1) -> dict[str, Any]:
    """The figures, as they are printed."""
    process = psutil.Process()
    with open_bundle(bundle, threads=threads) as decoder, open_bundle(bundle, threads=threads, verify=False) as reference:
        run = Soak(decoder, seed)
        addresses = decoder.backend.addresses()
        began = time.perf_counter()
        run.run(steps // 2)
        gc.collect()
        middle, half = time.perf_counter(), process.memory_info().rss
        run.run(steps - steps // 2)
        gc.collect()
        ended, grown = time.perf_counter(), process.memory_info().rss - half
        same = addresses == decoder.backend.addresses()
        lengths = sorted(stream.position for stream in run.streams)
        # Every stream takes one more token, all in one step, so that the logits compared are those of the shared graph.
        logits = run.step(np.arange(len(run.streams)))
        worst = max(off_by(got, run.ids_of(stream), reference) for stream, got in logits.items())
        manifest = decoder.manifest
        return {
            "rows": manifest.batch,
            "capacity_slots": decoder.shortest_capacity,
            "slack_tokens": decoder.slack_tokens,
            "calls": steps,
            "calls_by_kind": dict(sorted(run.counts.items())),
            "streams_at_the_end": len(run.streams),
            "their_tokens": {"shortest": lengths[0], "median": lengths[len(lengths) // 2], "longest": lengths[-1]},
            "first_half_seconds": round(middle - began, 2),
            "second_half_seconds": round(ended - middle, 2),
            "resident_growth_over_second_half_bytes": grown,
            "addresses_unchanged": same,
            "cache_bytes": decoder.cache_bytes,
            "largest_error_of_largest_logit": float(f"{worst:.3g}"),
            "tolerance": TOLERANCE,
        }


def off_by(logits: np.ndarray, ids: np.ndarray, reference: Decoder) -> float:
    """Largest difference of a stream's logits [V] from those of a solo run over its ids, in units of the largest logit."""
    with reference.stream() as solo:
        expected = solo.feed(ids)
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def failures(result: dict[str, Any]) -> list[str]:
    """What does not hold."""
    wrong = []
    if not result["largest_error_of_largest_logit"] <= result["tolerance"]:
        wrong.append(f"a stream is off by {result['largest_error_of_largest_logit']} of its largest logit")
    if result["resident_growth_over_second_half_bytes"] > GROWTH_BYTES:
        wrong.append(f"resident memory has grown by {result['resident_growth_over_second_half_bytes']} bytes over the second half")
    if not result["addresses_unchanged"]:
        wrong.append("a cache has moved")
    return wrong


def export_tiny(folder: Path) -> Path:
    """A random Llama of 2 layers, D = 8, V = 97, its weights so large that its logits tell tokens apart; S = 4, W = 24, chunk 8."""
    import torch
    from sinkring.exporter import export_decoder
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    export_decoder(folder / "model", folder / "bundle", sinks=4, window=24, chunk=8, batch=ROWS, targets=["onnxruntime"])
    return folder / "bundle"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="a bundle of two rows or more (default: a tiny one, made for this run)")
    parser.add_argument("--steps", type=int, default=20_000, help="calls, of which 80 %% are steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(args.bundle or export_tiny(Path(folder)), args.steps, args.seed)
    about = {
        "command": "python scripts/soak_streams.py" + "".join(f" {word}" for word in sys.argv[1:]),
        "machine": dataclasses.asdict(describe_machine()),
        "versions": {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__},
        "bundle": args.bundle.name if args.bundle else "a random Llama: 2 layers, 4/2 heads of 8, V = 97; S = 4, W = 24, chunk 8",
    }
    print(json.dumps({**about, **result}, indent=2))
    for wrong in failures(result):
        print(wrong, file=sys.stderr)
    return 1 if failures(result) else 0


if __name__ == "__main__":
    sys.exit(main())
