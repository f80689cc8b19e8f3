"""Tiny random models as bundles whose rings wrap after a few tokens, with the oracle at hand."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sinkring.exporter.export import DTYPES, export_decoder
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.runtime.decoder import Decoder, open_bundle
from sinkring.runtime.manifest import Policy
from sinkring.runtime.ring import RingGeometry

from tests.models.tiny import tiny_llama

TARGETS = ("onnxruntime", "tensorrt-rtx")
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.7, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
# Of the rotations, yarn and longrope also scale cos and sin.
# One layer shows its angles as well as two, and is traced in half the time.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn, one layer": {"seed": 7, "layers": 1, "rope_parameters": _YARN},
    "linear": {"seed": 3, "layers": 1, "rope_parameters": _LINEAR},
    "llama3, shorter": {"seed": 4, "layers": 1, "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 8}},
    "dynamic": {"seed": 5, "layers": 1, "rope_parameters": _DYNAMIC, "max_position_embeddings": 22},
    "longrope": {"seed": 6, "layers": 1, "rope_parameters": LONGROPE, "max_position_embeddings": 64},
    "yarn": {"seed": 1, "heads": 3, "kv_heads": 1, "tied": True, "rope_parameters": _YARN},
    "llama3": {"seed": 2, "heads": 2, "kv_heads": 2, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3},
}


@dataclass(frozen=True)
class Export:
    """What is exported; tokens."""

    model: str
    policy: Policy
    sinks: int
    window: int
    chunk: int
    batch: int = 1
    cache_dtype: str | None = None
    dtype: str = "fp32"


# The exporter rounds C up to a multiple of 8.
EXPORTS = {
    "tight native": Export("plain", "native", sinks=3, window=5, chunk=1),  # M=5
    "tight streaming": Export("plain", "streaming", sinks=3, window=5, chunk=1),
    "chunk 4 native": Export("plain", "native", sinks=3, window=7, chunk=4),  # M=13
    "chunk 4 streaming": Export("plain", "streaming", sinks=3, window=7, chunk=4),
    "chunk 8 streaming": Export("yarn", "streaming", sinks=1, window=7, chunk=8),  # M=15
    "no sinks": Export("llama3", "native", sinks=0, window=5, chunk=4),  # M=8
    "two rows": Export("plain", "streaming", sinks=2, window=4, chunk=3, batch=2),  # M=6
}
# Each kind of rope under each policy that it is defined for, where EXPORTS lacks it. S + W is 22 and 8, longrope's original context 16.
ROPE_EXPORTS = {
    "linear streaming": Export("linear", "streaming", sinks=2, window=6, chunk=3),
    "linear native": Export("linear", "native", sinks=2, window=6, chunk=3),
    "llama3 streaming": Export("llama3, shorter", "streaming", sinks=2, window=6, chunk=3),
    "yarn native": Export("yarn, one layer", "native", sinks=2, window=6, chunk=3),
    "dynamic streaming": Export("dynamic", "streaming", sinks=2, window=20, chunk=3),
    "dynamic native": Export("dynamic", "native", sinks=0, window=22, chunk=3),
    "longrope short streaming": Export("longrope", "streaming", sinks=2, window=6, chunk=3),
    "longrope short native": Export("longrope", "native", sinks=0, window=16, chunk=1),
    "longrope long streaming": Export("longrope", "streaming", sinks=2, window=20, chunk=3),
}
# Caches of 16 bits, and weights, too: each is EXPORTS' of the same name otherwise.
NARROW_EXPORTS = {
    f"{name}, {share}{dtype}": dataclasses.replace(EXPORTS[name], **{"dtype" if share else "cache_dtype": dtype})
    for dtype in ("fp16", "bf16")
    for share in ("", "all ")
    for name in ("chunk 4 native", "chunk 4 streaming")
} | {
    "two rows, fp16": dataclasses.replace(EXPORTS["two rows"], cache_dtype="fp16"),
    "two rows, all bf16": dataclasses.replace(EXPORTS["two rows"], dtype="bf16"),
}
# Each kind of rope once more with float16 caches.
NARROW_ROPE_EXPORTS = {f"{name}, fp16": dataclasses.replace(export, cache_dtype="fp16") for name, export in ROPE_EXPORTS.items()}
SINGLE_ROW = tuple(name for name, export in EXPORTS.items() if export.batch == 1)


@dataclass
class TinyBundle:
    """An exported bundle and the model it was made from."""

    path: Path
    export: Export
    model: Any
    geometry: RingGeometry
    _decoders: dict[str, Decoder] = field(default_factory=dict)

    def decoder(self, target: str = "onnxruntime") -> Decoder:
        """Open for the whole session; a test closes the streams that it takes."""
        if target not in self._decoders:
            self._decoders[target] = open_bundle(self.path, target=target, threads=1)
        return self._decoders[target]

    def close(self) -> None:
        for decoder in self._decoders.values():
            decoder.close()

    @property
    def wrapped_thrice(self) -> int:
        """A number of tokens that is past the third wrap and five windows."""
        return max(self.geometry.sinks_tokens + 3 * self.geometry.slots + 2, 5 * self.geometry.window_tokens)

    def oracle(self, ids: np.ndarray, sinks: int | None = None, window: int | None = None, policy: Policy | None = None) -> np.ndarray:
        """float32 [N,V]: what the bundle must give, or, with another geometry or policy, what it must not."""
        logits = streaming_logits if (policy or self.export.policy) == "streaming" else masked_dense_logits
        sinks = self.export.sinks if sinks is None else sinks
        return logits(self.model, torch.from_numpy(ids), sinks, window or self.export.window).numpy()


def text(tokens: int, seed: int = 0) -> np.ndarray:
    """Random token ids, int64 [tokens]."""
    return np.random.default_rng(seed).integers(0, 97, tokens)


def feed_in_cuts(decoder: Decoder, ids: np.ndarray, cuts: Iterable[int]) -> np.ndarray:
    """Feed a fresh stream in calls of the given lengths, again and again until `ids` is used up. float32 [N,V]."""
    lengths, parts, start = list(cuts), [], 0
    with decoder.stream() as stream:
        while start < len(ids):
            for length in lengths:
                if start < len(ids):
                    parts.append(stream.feed(ids[start : start + length], all_logits=True))
                    start += length
        assert stream.position == len(ids)
    return np.concatenate(parts)


def export_tiny(name: str, folder: Path) -> TinyBundle:
    export = {**EXPORTS, **ROPE_EXPORTS, **NARROW_EXPORTS, **NARROW_ROPE_EXPORTS}[name]
    model = tiny_llama(**MODELS[export.model])
    model.save_pretrained(folder / "model")
    manifest = export_decoder(
        folder / "model",
        folder / "bundle",
        policy=export.policy,
        sinks=export.sinks,
        window=export.window,
        chunk=export.chunk,
        batch=export.batch,
        dtype=export.dtype,
        cache_dtype=export.cache_dtype,
        targets=TARGETS,
    )
    if export.dtype != "fp32":
        round_weights(model, DTYPES[export.dtype])
    return TinyBundle(folder / "bundle", export, model, manifest.rings[0].geometry)


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """The weights that a graph of `dtype` has, in a model that computes in float32."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
