"""Ways of giving a model a text longer than its cache, each as a function from a text to the loss of its tokens.

    dense       eager PyTorch, a cache that grows without end
    window      the last S + W tokens, no sinks: what a plain sliding window keeps
    recompute   the last S + W tokens, computed anew for each token as if the text began with them: slow, and what the others stand for
    streaming   S sinks and a window of W, StreamingLLM's positions
    native      S sinks and a window of W, the text's own positions
    oracle      the same as streaming, by the literal, slow StreamingLLM in eager PyTorch

A scorer takes the ids int64 [N+1] of a text from its start and returns the losses float64 [N] of ids[1:], NaN where it scores none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sinkring.exporter.bundle_cache import cached_bundle
from sinkring.exporter.token_loss import stream_losses, token_loss
from sinkring.models.oracle import streaming_logits
from sinkring.models.source import load_model
from sinkring.runtime.decoder import Decoder, open_bundle
from transformers import DynamicCache

Scorer = Callable[[NDArray[np.int64]], NDArray[np.float64]]
POLICIES = ("dense", "window", "recompute", "streaming", "native")
ALL_POLICIES = (*POLICIES, "oracle")


@dataclass(frozen=True)
class Setup:
    """What is scored. given: a bundle of the user's and its policy, which is used where it fits; bundles: folder for the others.

    recompute_every: of so many tokens one is recomputed. chunk: tokens a call. threads: None for all cores.
    """

    model: str
    sinks: int
    window: int
    bundles: Path
    given: tuple[Path, str] | None = None
    chunk: int = 64
    recompute_every: int = 64
    threads: int | None = None
    progress: Callable[[str], None] | None = None

    @property
    def cache_tokens(self) -> int:
        return self.sinks + self.window


@contextmanager
def open_policy(name: str, setup: Setup) -> Iterator[Scorer]:
    """A scorer, and behind it a model or a bundle for the time of the block. name: one of ALL_POLICIES."""
    if name in ("dense", "oracle"):
        network = load_model(setup.model).model
        score = score_dense if name == "dense" else score_oracle
        yield lambda ids: score(network, ids, setup)
        return
    with open_bundle(_bundle(name, setup), threads=setup.threads, verify=False) as decoder:
        score_stream = score_recomputed if name == "recompute" else score_streamed
        yield lambda ids: score_stream(decoder, ids, setup)


def score_streamed(decoder: Decoder, ids: NDArray[np.int64], setup: Setup) -> NDArray[np.float64]:
    """Through the runtime, in exact chunks."""
    with decoder.stream() as stream:
        return np.concatenate(list(stream_losses(stream, ids[:-1], ids[1:], setup.chunk)))


def score_recomputed(decoder: Decoder, ids: NDArray[np.int64], setup: Setup) -> NDArray[np.float64]:
    """One token in `recompute_every`: a new stream over the last S + W tokens, none of which leaves its cache."""
    losses = np.full(len(ids) - 1, np.nan)
    with decoder.stream() as stream:
        for last in range(setup.cache_tokens - 1, len(losses), setup.recompute_every):
            stream.reset()
            logits = stream.feed(ids[last + 1 - setup.cache_tokens : last + 1])
            losses[last] = token_loss(logits[None], ids[last + 1 : last + 2])[0]
    return losses


@torch.no_grad()
def score_dense(network: Any, ids: NDArray[np.int64], setup: Setup) -> NDArray[np.float64]:
    """Eager attention to all tokens before, whatever the model was trained for; memory grows with the text."""
    cache, losses = DynamicCache(), []
    # transformers renames it; the old name warns, the new one is not yet known everywhere.
    name = "cache" if "cache" in signature(network.forward).parameters else "past_key_values"
    for start in range(0, len(ids) - 1, setup.chunk):
        piece = torch.from_numpy(ids[start : start + setup.chunk][: len(ids) - 1 - start])
        logits = network(input_ids=piece[None], use_cache=True, **{name: cache}).logits[0]
        losses.append(token_loss(logits.numpy(), ids[start + 1 : start + 1 + len(piece)]))
    return np.concatenate(losses)


def score_oracle(network: Any, ids: NDArray[np.int64], setup: Setup) -> NDArray[np.float64]:
    logits = streaming_logits(network, torch.from_numpy(ids[:-1]), setup.sinks, setup.window)
    return token_loss(logits.numpy(), ids[1:])


def _bundle(name: str, setup: Setup) -> Path:
    """Where a policy's bundle is. A recomputed text is one that no ring forgets, so any bundle of S + W tokens will do."""
    wanted = "streaming" if name == "recompute" else name
    if setup.given and setup.given[1] == wanted:
        return setup.given[0]
    sinks, window = (0, setup.cache_tokens) if name == "window" else (setup.sinks, setup.window)
    return cached_bundle(
        setup.bundles,
        setup.model,
        # Without sinks the two are one.
        policy="native" if name == "native" else "streaming",
        sinks=sinks,
        window=window,
        chunk=setup.chunk,
        progress=setup.progress,
    )
