"""ExecuTorch with its attention sink, on XNNPACK: a .pte file that `export_executorch.py` made."""

from importlib.metadata import version

import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  # registers the operators of its attention
from executorch.extension.pybindings import portable_lib
from executorch.kernels import quantized  # noqa: F401  # registers the operators of quantized embeddings
from worker import serve, timed_ms


class ExecuTorch:
    def load(self, model: str, ids: list[int], window: int, threads: int, steps: int) -> dict[str, str]:
        portable_lib._unsafe_reset_threadpool(threads)
        self.module = portable_lib._load_for_executorch(model)
        self.ids, self.window, self.position = torch.tensor([ids]), window, 0
        return {"executorch": version("executorch"), "torch": torch.__version__}

    def prefill(self, tokens: int) -> float:
        return timed_ms(lambda: self._run(self.ids[:, :tokens], 0))

    def decode(self, steps: int) -> list[float]:
        # The ring holds twice the window: all of it is read at every step, whatever has been written.
        token = self._run(self.ids[:, : self.window], 0)
        self.token = self._run(token, self.window)
        self.position = self.window + 1
        return [timed_ms(self._step) for _ in range(steps)]

    def beyond(self) -> str:
        position = 0
        piece = self.ids[:, :64]
        try:
            for position in range(0, 8192 + 256, 64):
                self._run(piece, position)
        except RuntimeError as error:
            return f"stops at {position} tokens: {error}"
        return (
            f"goes on (here to position {position + 64}) in a ring of twice the window; keys are rotated by their slot, so distances that "
            "span the end of the ring are wrong, as its own source says"
        )

    def _step(self) -> None:
        self.token = self._run(self.token, self.position)
        self.position += 1

    def _run(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """The likeliest next token [1, 1]. A program takes one token less than the max_seq_length it was exported with."""
        for piece in ids.split(self.window // 2, dim=1):
            (logits,) = self.module.forward((piece.contiguous(), torch.tensor([position])))
            position += piece.shape[1]
        return logits.reshape(1, -1, logits.shape[-1])[:, -1:].argmax(-1)


if __name__ == "__main__":
    serve(ExecuTorch())
