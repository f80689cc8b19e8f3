"""What leaves the cache is forgotten: StreamingLLM's StreamEval (Figure 9, Table 7), in small.

One stream of lines, each with a name and a code of four digits and, if asked for, some ordinary text. After each line the stream is asked
for the codes of lines further and further back; a question and its right answer are fed in one call, the answer counts if each of its
digits was the likeliest token, and the stream is rolled back to where it was. How far back a code lies is counted in tokens, from the
question's end to its first digit, as the window is: so it is known of each question whether its answer is still in the cache.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from results import new_figure, options, save_figure, say, write_csv, write_json
from sinkring.exporter.bundle_cache import cached_bundle
from sinkring.exporter.long_text import read_text
from sinkring.runtime import open_bundle
from sinkring.runtime.text import TextCodec

SINKS, DIGITS = 4, 4
NAMES = [
    "falcon",
    "maple",
    "river",
    "stone",
    "candle",
    "winter",
    "garden",
    "silver",
    "ocean",
    "tiger",
    "violet",
    "copper",
    "meadow",
    "rocket",
    "shadow",
    "amber",
]
KINDS = [
    "house",
    "school",
    "ship",
    "tower",
    "bank",
    "church",
    "bridge",
    "farm",
    "hotel",
    "market",
    "museum",
    "station",
    "theater",
    "castle",
    "library",
    "harbor",
]
STRETCH_TOKENS = 32
LINE_TOKENS = 17  # of a line without its text, about


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--caches", type=int, nargs="+", default=[256, 512], help="tokens, S + W")
    parser.add_argument("--lines", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--filler", type=int, default=0, help="tokens of ordinary text after each line (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of names and codes (%(default)s)")
    args = parser.parse_args()
    rows, edges = [], []
    for cache in args.caches:
        bundle = cached_bundle(args.bundles, args.model, policy="streaming", sinks=SINKS, window=cache - SINKS)
        asked = ask(bundle, cache, args)
        rows += [(cache, *row) for row in stretches(asked)]
        edges.append((cache, *at_the_edge(asked, cache - SINKS)))
    headings = ("cache", "from_tokens_back", "to_tokens_back", "questions", "recalled", "recall")
    write_csv(args, "recall", headings, rows)
    summary = ("cache", "questions_inside", "recall_inside", "questions_outside", "recalled_outside")
    write_json(args, "recall", {"edges": [dict(zip(summary, edge, strict=True)) for edge in edges]})
    draw(args, rows)
    for cache, inside, recall, outside, recalled in edges:
        print(f"cache {cache}: recall {recall:.1%} of {inside} within the window, {recalled} of {outside} beyond it")
    return 0


def ask(bundle: Path, cache: int, args: argparse.Namespace) -> list[tuple[int, bool]]:
    """(tokens from the question's last to the answer's first digit, recalled) of every question."""
    rng = np.random.default_rng(args.seed)
    with open_bundle(bundle, threads=args.threads) as decoder, decoder.stream() as stream:
        codec = TextCodec.open(bundle, decoder.manifest.tokenizer)
        pairs = rng.permutation([(name, kind) for name in NAMES for kind in KINDS])[: args.lines]
        # Lines back: past one and a half times the cache.
        filler = codec.encode(read_text("topics"), add_bos=False)
        steps = np.unique(np.linspace(0, cache * 1.6 / (args.filler + LINE_TOKENS), 10).astype(int))
        said: list[tuple[str, str, int]] = []  # subject, code, position of its first digit
        asked = []
        for number, (name, kind) in enumerate(pairs):
            subject, code = f"the {name} {kind}", "".join(map(str, rng.integers(0, 10, DIGITS)))
            line, answer = f"The code of {subject} is ", code
            front, digits = codec.encode(line, add_bos=False), codec.encode(answer, add_bos=False)
            said.append((subject, code, stream.position + len(front)))
            between = filler[number * args.filler : (number + 1) * args.filler]
            newline = codec.encode("\n", add_bos=False)[: len(between)]
            stream.feed(np.concatenate([front, digits, codec.encode(".\n", add_bos=False), between, newline]))
            for back in steps[steps < len(said)]:
                subject, code, first_digit = said[-1 - back]
                question = codec.encode(f"Question: What is the code of {subject}? Answer: The code of {subject} is ", add_bos=False)
                digits = codec.encode(code, add_bos=False)
                fed = np.concatenate([question, digits])
                distance = stream.position + len(question) - 1 - first_digit
                logits = stream.feed(fed, all_logits=True)
                stream.rollback(len(fed))
                asked.append((distance, recalled(logits[len(question) - 1 : -1], digits)))
            if number % 10 == 0:
                say(f"cache {cache}", number, args.lines)
    return asked


def recalled(logits: NDArray[np.float32], digits: NDArray[np.int64]) -> bool:
    """Whether greedy decoding would have said all digits: each is the likeliest after the right ones before it."""
    return bool((logits.argmax(axis=-1) == digits).all())


def stretches(asked: list[tuple[int, bool]]) -> list[tuple[int, int, int, int, float]]:
    rows = []
    for start in range(0, max(distance for distance, _ in asked) + 1, STRETCH_TOKENS):
        right = [good for distance, good in asked if start <= distance < start + STRETCH_TOKENS]
        if right:
            rows.append((start, start + STRETCH_TOKENS, len(right), sum(right), sum(right) / len(right)))
    return rows


def at_the_edge(asked: list[tuple[int, bool]], window: int) -> tuple[int, float, int, int]:
    """Questions and recall where every digit is within the window of the token that asks for it; questions and hits where none is.

    The i-th digit is asked for by the token i places after the question's last, and lies i places after the first digit: all digits are
    equally far back, and within the window if that is less than W.
    """
    inside = [good for distance, good in asked if distance < window]
    outside = [good for distance, good in asked if distance >= window]
    return len(inside), sum(inside) / len(inside), len(outside), sum(outside)


def draw(args: argparse.Namespace, rows: list[tuple]) -> None:
    figure, axes = new_figure(f"{args.model}, recall of a four-digit code", "tokens between the question and the code", "recalled")
    for cache in args.caches:
        own = [row for row in rows if row[0] == cache]
        (line,) = axes.plot([(row[1] + row[2]) / 2 for row in own], [row[5] for row in own], marker=".", label=f"S + W = {cache}")
        axes.axvline(cache - SINKS, color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend()
    save_figure(args, "recall", figure)


if __name__ == "__main__":
    sys.exit(main())
