"""Eager transformers in float32, with its dynamic or its static cache: `peer_transformers.py dynamic`."""

import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from worker import losses_of, serve, timed_ms


class Transformers:
    def __init__(self, cache: str) -> None:
        self.kind = cache

    def load(self, model: str, ids: list[int], window: int, threads: int, steps: int) -> dict[str, str]:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.cache: DynamicCache | StaticCache | None = None
        self.ids, self.window, self.context = torch.tensor([ids]), window, window + steps
        return {"transformers": transformers.__version__, "torch": torch.__version__, "attention": self.model.config._attn_implementation}

    def prefill(self, tokens: int) -> float:
        self._empty()
        return timed_ms(lambda: self._run(self.ids[:, :tokens]))

    def decode(self, steps: int) -> list[float]:
        if self.kind == "dynamic" and self.cache is not None and self.cache.get_seq_length() >= self.window:
            # A negative number takes so many tokens away.
            self.cache.crop(self.window - 1 - self.cache.get_seq_length())
            token = self.ids[:, self.window - 1 : self.window]
        else:
            self._empty()
            token = self._run(self.ids[:, : self.window - 1])
        token = self._run(token)
        times = []
        for _ in range(steps):

            def step(token: torch.Tensor = token) -> None:
                self.next = self._run(token)

            times.append(timed_ms(step))
            token = self.next
        return times

    def beyond(self) -> str:
        self._empty()
        self._run(self.ids[:, : self.context])
        before = self._cache_bytes()
        token = self._run(self.ids[:, :1])
        for _ in range(63):
            token = self._run(token)
        grown = self._cache_bytes() - before
        return f"goes on, and its cache grows by {grown / 64:,.0f} bytes a token" if grown else "goes on in the same memory"

    def losses(self, piece: list[int]) -> list[float]:
        return losses_of(self.model(input_ids=torch.tensor([piece])).logits[0], piece)

    def _empty(self) -> None:
        self.cache = DynamicCache() if self.kind == "dynamic" else StaticCache(config=self.model.config, max_cache_len=self.context)

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        """The likeliest next token [1, 1]."""
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    def _cache_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.cache.layers for tensor in (layer.keys, layer.values))


if __name__ == "__main__":
    serve(Transformers(sys.argv[1]))
