"""Tiny GGUF files of several families, written as llama.cpp's converter writes them, and what their tensors hold once dequantized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, dequantize, get_tensor_name_map, quantize
from gguf.quants import quant_shape_to_byte_shape

Kind = GGMLQuantizationType
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
# Bytes of a block, and where in it the float16 scales are; gguf has no quantizer of these kinds in Python.
_K_BLOCKS = {Kind.Q4_K: (144, (0, 2)), Kind.Q5_K: (176, (0, 2)), Kind.Q6_K: (210, (208,))}


def random_blocks(shape: tuple[int, int], kind: Kind, seed: int) -> np.ndarray:
    """uint8 [rows,bytes]: any bits are a valid block, but for the scales, which must be finite; they are around 0.002."""
    size, scales = _K_BLOCKS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 256, size), dtype=np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = (0.001 + 0.002 * rng.random(len(blocks))).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(quant_shape_to_byte_shape(shape, kind))


def keys_of(config: Any, arch: str) -> dict[str, Any]:
    """What llama.cpp's converter says of a model in every family, and of some."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    norm = next(getattr(config, name) for name in names if hasattr(config, name))
    rms = hasattr(config, "rms_norm_eps")
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": getattr(config, "max_position_embeddings", 256),
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        f"attention.layer_norm_{'rms_' if rms else ''}epsilon": float(norm),
        "vocab_size": config.vocab_size,
    }
    if rope:
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.dimension_count"] = int(head_size * (rope.get("partial_rotary_factor") or 1.0))
    if arch in ("qwen3", "gemma2", "gemma3"):
        keys |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if arch in ("gemma2", "gemma3"):
        keys["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        keys |= {"attn_logit_softcapping": config.attn_logit_softcapping, "final_logit_softcapping": config.final_logit_softcapping}
    return keys


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    kind: Kind = Kind.F32,
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Write `model` with matrices of `kind`; `keys` go over what is said of it, None leaves a key out. -> its tensors as they then are."""
    writer = GGUFWriter(path, arch)
    writer.add_name("tiny")
    said = {**keys_of(model.config, arch), **(keys or {})}
    for key, value in said.items():
        if value is not None:
            _add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{arch}.{key}", value)
    enum = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(enum, model.config.num_hidden_layers)
    there = {}
    for seed, (name, weight) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        array, back = _stored(name, weight.numpy(), arch, model.config)
        if array.ndim == 2 and kind in _K_BLOCKS:
            data = random_blocks(array.shape, kind, seed)
            truth = dequantize(data, kind)
        elif array.ndim == 2 and kind not in (Kind.F32, Kind.F16):
            data = quantize(array, kind)
            truth = dequantize(data, kind)
        else:
            data = array.astype(np.float16 if kind == Kind.F16 and array.ndim == 2 else np.float32)
            truth = data.astype(np.float32)
        raw = None if data.dtype in (np.float16, np.float32) else kind
        target = names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
        assert target is not None, name
        writer.add_tensor(f"{target}.{suffix}", np.ascontiguousarray(data), raw_dtype=raw)
        there[name] = torch.from_numpy(np.ascontiguousarray(back(truth)))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return there


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _stored(name: str, array: np.ndarray, arch: str, config: Any) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """How the format holds a tensor, and the way back: llama's q and k in the order of pairs, gemma's norms with the 1 that is added."""
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        half = config.head_dim // 2
        # Row 2i + j of a head is the model's row i + j * half.
        order = np.array([head + (row % 2) * half + row // 2 for head in range(0, len(array), 2 * half) for row in range(2 * half)])
        return array[order], lambda stored: stored[np.argsort(order)]
    if arch in ("gemma2", "gemma3") and "norm" in name:
        return array + 1, lambda stored: stored - 1
    if arch == "bloom" and "query_key_value" in name:
        heads, size = config.n_head, config.hidden_size // config.n_head
        split = array.reshape(heads, 3, size, *array.shape[1:]).swapaxes(0, 1)
        return split.reshape(array.shape), lambda stored: stored.reshape(split.shape).swapaxes(0, 1).reshape(stored.shape)
    return array, lambda stored: stored
