"""One stream, fed a long text, a million tokens and more: does its loss, its speed, its memory or its attention drift?

The stream is given the text's own tokens and each is scored. After every block of tokens a row is added to OUT/blocks.csv and the stream is
saved to OUT/stream.snapshot: killed at any time, the same command goes on where the last block ended. Beside it, at the start of each
block, a young stream that has just filled its ring is fed the same pieces in turns: what the text and the machine do to both cancels in
the difference. `scripts/plot_soak.py OUT` draws the curves and fits their slopes.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sinkring.exporter.attention_probe import AttentionProbe
from sinkring.exporter.long_text import read_long_ids, text_at
from sinkring.exporter.process_memory import memory_bytes
from sinkring.exporter.token_loss import token_loss
from sinkring.runtime import Decoder, SinkringError, Stream, open_bundle

ROOT = Path(__file__).resolve().parents[1]
CSV_NAME, SNAPSHOT_NAME = "blocks.csv", "stream.snapshot"
# Of each block: tokens that the young stream is fed too, and tokens that the attention is looked at for.
PAIRED_TOKENS, PROBED_TOKENS = 512, 8


@dataclass(frozen=True)
class Block:
    """One row of the CSV. run: which process, as each has memory of its own. tokens: position at the block's end. loss: nats a token.

    old_*, young_*: both streams over the block's first PAIRED_TOKENS tokens; NaN in the first block, where all streams are young.
    tokens_per_second: of the rest. Scores and share: see AttentionSeen.
    """

    run: int
    tokens: int
    loss: float
    tokens_per_second: float
    old_loss: float
    young_loss: float
    old_seconds: float
    young_seconds: float
    resident_bytes: int
    anonymous_bytes: int
    cache_bytes: int
    moved_addresses: int
    largest_score: float
    typical_score: float
    sink_share: float
    load_average: float


class Soak:
    """The two streams, and where the run stands. call_tokens: the longest call; 1 runs the decode graph."""

    def __init__(self, old: Decoder, young: Decoder, ids: NDArray[np.int64], out: Path, block_tokens: int, call_tokens: int) -> None:
        self.decoder, self.ids, self.out = old, ids, out
        self.block_tokens, self.call_tokens = block_tokens, call_tokens
        out.mkdir(parents=True, exist_ok=True)
        snapshot = out / SNAPSHOT_NAME
        self.stream = old.restore(snapshot) if snapshot.exists() else old.stream()
        self.young = young.stream()
        # A row is written before its snapshot: a run that was killed between the two does the block again.
        rows = [row for row in read_rows(out / CSV_NAME) if row.tokens <= self.stream.position]
        self.run = max((row.run for row in rows), default=0) + 1
        write_rows(out / CSV_NAME, rows)
        self.addresses = old.backend.addresses()
        self.probe = AttentionProbe(old.path, old.manifest, threads=1)

    def block(self) -> Block:
        """Feed a block, write its row and save the stream."""
        start = self.stream.position
        old_loss, old_seconds, young_loss, young_seconds = self._paired(start) if start else (float("nan"),) * 4
        done = self.stream.position - start
        loss, seconds = self._feed(self.stream, self.stream.position, self.block_tokens - done)
        position, state = self.stream.position, self.stream.capture()[1]
        seen = self.probe.look(state, position, text_at(self.ids, position, PROBED_TOKENS))
        memory = memory_bytes()
        row = Block(
            run=self.run,
            tokens=position,
            loss=(loss + (old_loss if done else 0.0)) / self.block_tokens,
            tokens_per_second=round((self.block_tokens - done) / seconds, 2),
            old_loss=old_loss / PAIRED_TOKENS,
            young_loss=young_loss / PAIRED_TOKENS,
            old_seconds=old_seconds,
            young_seconds=young_seconds,
            resident_bytes=memory["VmRSS"],
            anonymous_bytes=memory["RssAnon"],
            cache_bytes=sum(state[name].nbytes for name in self.addresses),
            moved_addresses=sum(where != self.addresses[name] for name, where in self.decoder.backend.addresses().items()),
            largest_score=seen.largest_score,
            typical_score=seen.typical_score,
            sink_share=seen.sink_share,
            load_average=os.getloadavg()[0],
        )
        write_rows(self.out / CSV_NAME, [row], append=True)
        self.stream.snapshot(self.out / SNAPSHOT_NAME)
        return row

    def _paired(self, start: int) -> tuple[float, float, float, float]:
        """Summed loss and seconds of the old stream, then of the young one, call by call in turns."""
        geometry = self.decoder.manifest.rings[0].geometry
        # As far from its next wrap as the old one: a call that crosses it is cut in two, and costs more.
        young = 2 * geometry.capacity
        young += (start - young) % geometry.slots
        self.young.reset()
        self.young.feed(text_at(self.ids, start - young, young))
        totals = np.zeros((2, 2))
        for offset in range(0, PAIRED_TOKENS, self.call_tokens):
            for total, stream in zip(totals, (self.stream, self.young), strict=True):
                total += self._feed(stream, start + offset, min(self.call_tokens, PAIRED_TOKENS - offset))
        (old_loss, old_seconds), (young_loss, young_seconds) = totals.tolist()
        return old_loss, old_seconds, young_loss, young_seconds

    def _feed(self, stream: Stream, position: int, tokens: int) -> tuple[float, float]:
        """Summed loss, and the seconds of the model alone, over the text's tokens from `position` on."""
        loss = seconds = 0.0
        for start in range(position, position + tokens, self.call_tokens):
            piece = text_at(self.ids, start, min(self.call_tokens, position + tokens - start) + 1)
            began = time.perf_counter()
            logits = stream.feed(piece[:-1], all_logits=True)
            seconds += time.perf_counter() - began
            loss += float(token_loss(logits, piece[1:]).sum())
        return loss, seconds


def read_rows(path: Path) -> list[Block]:
    """The CSV's rows; none if it is not there."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        kinds = {field.name: int if field.type in (int, "int") else float for field in fields(Block)}
        return [Block(**{name: kinds[name](value) for name, value in row.items()}) for row in csv.DictReader(file)]


def write_rows(path: Path, rows: list[Block], append: bool = False) -> None:
    with path.open("a" if append else "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Block)])
        if not append:
            writer.writeheader()
        writer.writerows(
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(row).items()} for row in rows
        )


@contextmanager
def bundle_or_tiny(bundle: Path | None) -> Iterator[Path]:
    """The bundle, or one of a random Llama of two layers, made for the time of the block."""
    if bundle is not None:
        yield bundle
        return
    import torch
    from sinkring.exporter import export_decoder
    from sinkring.models.quiet import quiet_transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        # A wider spread than the usual 0.02: logits as far apart as a trained model's, so that a fault would show in the loss.
        config = LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, initializer_range=0.3,
        )  # fmt: skip
        with quiet_transformers():
            LlamaForCausalLM(config).save_pretrained(Path(folder) / "model")
        export_decoder(Path(folder) / "model", Path(folder) / "bundle", sinks=4, window=24, chunk=8)
        yield Path(folder) / "bundle"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=ROOT / "bundles" / "smollm2", help="(%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a random Llama of two layers instead, on random ids")
    parser.add_argument("--text", default="kjv", help="topics, kjv, random, or a file; it begins anew at its end (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="in all, earlier runs of the same command included (%(default)s)")
    parser.add_argument("--block", type=int, default=10_000, help="tokens a row of the CSV (%(default)s)")
    parser.add_argument("--call", type=int, help="tokens a call; 1 runs the decode graph (default: the bundle's chunk)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "soak", help="folder of the CSV and the snapshot (%(default)s)")
    args = parser.parse_args()
    try:
        with (
            bundle_or_tiny(None if args.tiny else args.bundle) as bundle,
            open_bundle(bundle, threads=args.threads) as old,
            open_bundle(bundle, threads=args.threads, verify=False) as young,
        ):
            ids = read_long_ids(bundle, old.manifest, "random" if args.tiny else args.text).ids
            soak = Soak(old, young, ids, args.out, args.block, args.call or old.manifest.chunk)
            while soak.stream.position < args.tokens:
                row = soak.block()
                print(
                    f"{row.tokens:,} tokens: loss {row.loss:.4f}, {row.tokens_per_second:.0f} tokens/s, sinks {row.sink_share:.1%}",
                    flush=True,
                )
    except SinkringError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
