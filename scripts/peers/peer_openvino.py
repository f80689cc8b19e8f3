"""OpenVINO GenAI, on the GGUF file: `peer_openvino.py PA` or `SDPA`, its two ways of attention; `evict` is PA with its cache eviction."""

import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker import serve

# Tokens of a block in OpenVINO's paged cache; start, recent and largest size of an eviction are multiples of it.
_BLOCK = 32
# Tokens, of SmolLM2.
_TRAINED = 8192


class _Clock(genai.StreamerBase):
    """When each token came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: Any) -> genai.StreamingStatus:
        self.times += [time.perf_counter()] * (len(token) if isinstance(token, list) else 1)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class OpenVino:
    def __init__(self, attention: str) -> None:
        self.attention = attention

    def load(self, model: str, ids: list[int], window: int, threads: int, steps: int) -> dict[str, str]:
        self.ids, self.window = ids, window
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if self.attention == "SDPA":
            options["ATTENTION_BACKEND"] = "SDPA"
        else:
            scheduler = genai.SchedulerConfig()
            # A prompt that it has seen before would cost it nothing.
            scheduler.enable_prefix_caching = False
            if self.attention == "evict":
                scheduler.use_cache_eviction = True
                scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                    _BLOCK, window - 2 * _BLOCK, window, genai.AggregationMode.NORM_SUM, apply_rotation=True
                )
            options["scheduler_config"] = scheduler
        self.pipeline = genai.LLMPipeline(model, "CPU", **options)
        return {"openvino-genai": version("openvino-genai"), "openvino": version("openvino"), "attention": self.attention}

    def prefill(self, tokens: int) -> float:
        return self._generate(self.ids[:tokens], 1)[0]

    def decode(self, steps: int) -> list[float]:
        return self._generate(self.ids[: self.window], steps + 2)[2:]

    def beyond(self) -> str:
        """Past the context that the model was trained for."""
        self._generate(np.resize(self.ids, _TRAINED + 64).tolist(), 2)
        grows = "it evicts by score, the prompt is read whole first" if self.attention == "evict" else "the cache grows with the stream"
        return f"goes on past the trained context of {_TRAINED} tokens; {grows}"

    def losses(self, piece: list[int]) -> list[float]:
        raise NotImplementedError("its pipeline gives no logits")

    def _generate(self, ids: list[int], tokens: int) -> list[float]:
        """Milliseconds to each token from the one before; the first holds the prefill."""
        clock = _Clock()
        config = genai.GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)
        inputs = genai.TokenizedInputs(ov.Tensor(np.array([ids], np.int64)), ov.Tensor(np.ones((1, len(ids)), np.int64)))
        began = time.perf_counter()
        self.pipeline.generate(inputs, config, clock)
        return (np.diff([began, *clock.times]) * 1e3).tolist()


if __name__ == "__main__":
    serve(OpenVino(sys.argv[1]))
