"""sinkring, as a peer among peers: a bundle with a full ring."""

import sys

import numpy as np
import onnxruntime
from sinkring.runtime import open_bundle
from worker import losses_of, serve, timed_ms


class Sinkring:
    def load(self, model: str, ids: list[int], window: int, threads: int, steps: int) -> dict[str, str]:
        self.decoder = open_bundle(model, threads=threads, verify=False)
        geometry = self.decoder.manifest.rings[0].geometry
        assert geometry.window_tokens == window, f"{model}: W={geometry.window_tokens}, wanted {window}"
        self.ids = ids
        self.stream = self.decoder.stream()
        # Every slot of the ring has been written, slack included.
        self.stream.feed(np.resize(ids, geometry.capacity + 1))
        self.full = self.stream.capture()
        return {"onnxruntime": onnxruntime.__version__}

    def prefill(self, tokens: int) -> float:
        self.stream.reset()
        return timed_ms(lambda: self.stream.feed(self.ids[:tokens]))

    def decode(self, steps: int) -> list[float]:
        self.stream.install(*self.full)
        answer = self.stream.generate(steps + 2, stop_ids=())
        # The first token costs no step, and the second warms the caches of the CPU up.
        next(answer), next(answer)
        return [timed_ms(lambda: next(answer)) for _ in range(steps)]

    def beyond(self) -> str:
        self.stream.install(*self.full)
        before = self.stream.position
        self.stream.feed(np.resize(self.ids, 4 * self.decoder.manifest.chunk))
        return f"goes on for ever in the same memory (here from position {before} to {self.stream.position})"

    def losses(self, piece: list[int]) -> list[float]:
        self.stream.reset()
        return losses_of(self.stream.feed(piece, all_logits=True), piece)


if __name__ == "__main__":
    serve(Sinkring())
    sys.exit(0)
