"""StreamingLLM's cache (arXiv 2309.17453) for a Hugging Face decoder that runs token by token: it evicts, and turns keys by cache index.

The decoder is told position 0 for every token, so its own rotation turns nothing. The cache hands out the key at index i turned by
i - last, where last is the index of the query: the query that is not turned meets it as the two turned by their indices would meet.
Letters: G key/value heads, D head size, L tokens in a cache, the current one included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

# (keys [1, G, L, D], indices [L] int64) -> keys turned by them
Turn = Callable[[Tensor, Tensor], Tensor]


class _Layer(CacheLayerMixin):
    """keys, values: lists of [1, G, 1, D], oldest first. The first `sinks` and the last `window` are kept."""

    def __init__(self, sinks: int, window: int, sliding: bool, turn: Turn | None) -> None:
        super().__init__()
        self.is_sliding = sliding
        self._sinks, self._window, self._turn = sinks, window, turn
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states [1, G, 1, D] join; returns those of the whole cache [1, G, L, D], keys turned."""
        assert key_states.shape[-2] == 1, "one token at a time"
        self._keys.append(key_states)
        self._values.append(value_states)
        if len(self._keys) > self._sinks + self._window:
            del self._keys[self._sinks], self._values[self._sinks]
        keys, values = torch.cat(self._keys, dim=-2), torch.cat(self._values, dim=-2)
        if self._turn is not None:
            keys = self._turn(keys, torch.arange(len(self._keys)) - (len(self._keys) - 1))
        return keys, values

    def get_seq_length(self) -> int:
        """Index that the next token will have: this is what the model takes for the tokens before it."""
        return min(len(self._keys), self._sinks + self._window - 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._sinks + self._window


def streaming_cache(layers: list[tuple[int, int, bool, Turn | None]]) -> Cache:
    """An empty cache. layers: of each (S, W, whether the window is a trained one, how its keys turn)."""
    return Cache(layers=[_Layer(*layer) for layer in layers])
