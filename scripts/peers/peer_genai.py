"""onnxruntime-genai, on a folder that its model builder made from the GGUF file."""

from importlib.metadata import version

import numpy as np
import onnxruntime_genai as og
from worker import losses_of, serve, timed_ms


class Genai:
    def load(self, model: str, ids: list[int], window: int, threads: int, steps: int) -> dict[str, str]:
        config = og.Config(model)
        config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
        self.model = og.Model(config)
        self.generator: og.Generator | None = None
        self.ids, self.window, self.context = np.array(ids, np.int32), window, window + steps
        return {"onnxruntime-genai": version("onnxruntime-genai"), "onnxruntime": version("onnxruntime")}

    def prefill(self, tokens: int) -> float:
        self._empty()
        return timed_ms(lambda: self.generator.append_tokens(self.ids[None, :tokens]))

    def decode(self, steps: int) -> list[float]:
        if self.generator is None or self.generator.token_count() < self.window:
            self._empty()
            self.generator.append_tokens(self.ids[None, : self.window - 1])
        self.generator.rewind_to(self.window - 2)
        self.generator.append_tokens(self.ids[None, self.window - 2 : self.window - 1])
        # The first token comes from logits that are there, the second warms up.
        self.generator.generate_next_token()
        self.generator.generate_next_token()
        return [timed_ms(self.generator.generate_next_token) for _ in range(steps)]

    def beyond(self) -> str:
        self._empty()
        self.generator.append_tokens(self.ids[None, : self.window])
        for position in range(self.window, self.context + 64):
            try:
                self.generator.append_tokens(np.resize(self.ids, (1, 1)))
            except Exception as error:  # its errors have no class of their own
                return f"stops at {position} tokens with max_length={self.context}: {error}"
        return f"goes on past max_length={self.context}"

    def losses(self, piece: list[int]) -> list[float]:
        self._empty()
        self.generator.append_tokens(np.array([piece], np.int32))
        logits = self.generator.get_output("logits")[0]
        if len(logits) < len(piece):
            raise ValueError(f"its model gives the logits of {len(logits)} of {len(piece)} tokens")
        return losses_of(logits, piece)

    def _empty(self) -> None:
        params = og.GeneratorParams(self.model)
        # No end of a sentence may end the run.
        params.set_search_options(do_sample=False, max_length=self.context, min_length=self.context)
        self.generator = og.Generator(self.model, params)


if __name__ == "__main__":
    serve(Genai())
