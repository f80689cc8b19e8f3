"""Token loss: how surprised a model is by each token of a text, in nats. Its mean is the log-perplexity."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from sinkring.runtime.stream import Stream


def token_loss(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """-log p(target) in nats, float64 [N]; logits float32 [N, V] are those after the token before each target, targets int64 [N]."""
    losses = np.empty(len(targets))
    # Row by row: V numbers stay in the processor's cache, N times V do not.
    spent = np.empty(logits.shape[1], np.float32)
    for index, (row, target) in enumerate(zip(logits, targets, strict=True)):
        highest = row.max()
        np.subtract(row, highest, out=spent)
        np.exp(spent, out=spent)
        losses[index] = np.log(float(spent.sum(dtype=np.float64))) + float(highest) - float(row[target])
    return losses


def stream_losses(stream: Stream, ids: NDArray[np.int64], targets: NDArray[np.int64], tokens_a_call: int) -> Iterator[NDArray[np.float64]]:
    """Feed ids int64 [N] to a stream and yield the losses of targets int64 [N], the token that follows each, call by call.

    Exact for any tokens_a_call: any way of cutting a text into calls gives the same logits. No more than one call's logits are held.
    """
    for start in range(0, len(ids), tokens_a_call):
        piece = ids[start : start + tokens_a_call]
        yield token_loss(stream.feed(piece, all_logits=True), targets[start : start + len(piece)])
