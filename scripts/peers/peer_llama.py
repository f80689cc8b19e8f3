"""llama.cpp through llama-cpp-python, on a GGUF file; `peer_llama.py flash` turns its flash attention on."""

import sys

import llama_cpp
import numpy as np
from worker import losses_of, serve, timed_ms


class LlamaCpp:
    def __init__(self, flash: bool) -> None:
        self.flash = flash

    def load(self, model: str, ids: list[int], window: int, threads: int, steps: int) -> dict[str, str]:
        self.options = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self.path, self.ids, self.window = model, ids, window
        # llama.cpp rounds a context up to a multiple of 256.
        self.context = window + steps + -(window + steps) % 256
        self.llama = llama_cpp.Llama(model, n_ctx=self.context, n_batch=512, flash_attn=self.flash, **self.options)
        self.vocab = self.llama.n_vocab()
        return {"llama-cpp-python": llama_cpp.__version__, "llama.cpp": llama_cpp.llama_print_system_info().decode().strip()}

    def prefill(self, tokens: int) -> float:
        self.llama.reset()
        return timed_ms(lambda: self._run(self.ids[:tokens]))

    def decode(self, steps: int) -> list[float]:
        if self.llama.n_tokens < self.window:
            self.llama.reset()
            self._run(self.ids[: self.window])
        # What lies behind is cut off by the next call.
        self.llama.n_tokens = self.window - 1
        self.token = self._run(self.ids[self.window - 1 : self.window])
        return [timed_ms(self._step) for _ in range(steps)]

    def beyond(self) -> str:
        self.llama.reset()
        for start in range(0, self.context + 64, 64):
            try:
                self._run(np.resize(self.ids, self.context + 64)[start : start + 64].tolist())
            except (RuntimeError, ValueError) as error:
                return f"stops at {start} tokens with a context of {self.context}: {error}"
        return f"goes on past its context of {self.context}"

    def losses(self, piece: list[int]) -> list[float]:
        scorer = llama_cpp.Llama(self.path, n_ctx=len(piece), n_batch=512, logits_all=True, flash_attn=self.flash, **self.options)
        scorer.eval(piece)
        return losses_of(scorer.scores[: len(piece)], piece)

    def _step(self) -> None:
        self.token = self._run([self.token])

    def _run(self, ids: list[int]) -> int:
        self.llama.eval(ids)
        return int(np.ctypeslib.as_array(self.llama._ctx.get_logits(), shape=(self.vocab,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp(sys.argv[1:] == ["flash"]))
