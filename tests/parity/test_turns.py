"""Conversations by ids: several turns in a row, over several wraps, side by side; every answer is the one the oracle would give."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sinkring.models.oracle import top2_margin

from tests.parity.closeness import FLOAT32, assert_parity
from tests.parity.tiny_bundles import TARGETS, TinyBundle, text

Bundles = Callable[[str], TinyBundle]
QUESTIONS = (3, 1, 7, 20, 2, 5)
ANSWERS = (4, 9, 1, 6, 13, 8)


def assert_greedy(bundle: TinyBundle, said: list[int], answered: list[bool]) -> None:
    """Each token that the stream chose is the argmax of the oracle's logits, unless two are as near as the tolerance."""
    expected = bundle.oracle(np.array(said))
    margin = top2_margin(torch.from_numpy(expected)).numpy()
    clear = 0
    for at in range(1, len(said)):
        if answered[at] and margin[at - 1] > 2 * FLOAT32 * np.abs(expected).max():
            assert said[at] == int(expected[at - 1].argmax()), f"token {at}"
            clear += 1
    assert clear > sum(answered) // 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["chunk 4 native", "chunk 4 streaming", "chunk 8 streaming", "no sinks", "tight streaming"])
def test_turn_after_turn(parity_bundle: Bundles, name: str, target: str) -> None:
    bundle = parity_bundle(name)
    decoder = bundle.decoder(target)
    said: list[int] = []
    answered: list[bool] = []
    with decoder.stream() as stream:
        for turn, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
            ids = text(question, seed=30 + turn)
            stream.feed(ids)
            said += ids.tolist()
            answered += [False] * question
            # A turn that is cut short, one that runs to its length, one token by token.
            if turn % 3 == 0:
                tokens = list(itertools.islice(stream.generate(50, stop_ids=()), answer))
            elif turn % 3 == 1:
                tokens = list(stream.generate(answer, stop_ids=()))
            else:
                tokens = []
                for _ in range(answer):
                    tokens.append(stream.sample())
                    decoder.step({stream: tokens[-1]})
            said += tokens
            answered += [True] * answer
            assert stream.position == len(said)
        assert len(said) > bundle.geometry.sinks_tokens + 3 * bundle.geometry.slots
        stream.sample()
        assert_parity(stream._logits, bundle.oracle(np.array(said))[-1])
    assert_greedy(bundle, said, answered)


@pytest.mark.parametrize("target", TARGETS)
def test_two_conversations_in_steps(parity_bundle: Bundles, target: str) -> None:
    """One reads its next question while the other answers; both answer in one step where they can."""
    bundle = parity_bundle("two rows")
    decoder = bundle.decoder(target)
    with decoder.stream() as one, decoder.stream() as two:
        streams, said, answered = (one, two), ([], []), ([], [])
        stepped: list[list[tuple[int, np.ndarray]]] = [[], []]
        left = [0, 0]
        for turn in range(60):
            tokens = {}
            for row, stream in enumerate(streams):
                if not left[row]:
                    ids = text(1 + (turn + 3 * row) % 7, seed=40 + 2 * turn + row)
                    stream.feed(ids)
                    said[row].extend(ids.tolist())
                    answered[row].extend([False] * len(ids))
                    left[row] = 2 + (turn + row) % 4
                else:
                    tokens[stream] = stream.sample()
                    said[row].append(tokens[stream])
                    answered[row].append(True)
                    left[row] -= 1
            for stream, logits in (decoder.step(tokens) if tokens else {}).items():
                row = streams.index(stream)
                stepped[row].append((len(said[row]) - 1, logits))
    for row in range(2):
        assert len(said[row]) > 3 * bundle.geometry.capacity
        places, logits = zip(*stepped[row], strict=True)
        assert_parity(np.array(logits), bundle.oracle(np.array(said[row]))[list(places)], what=f"row {row}")
        assert_greedy(bundle, said[row], answered[row])
