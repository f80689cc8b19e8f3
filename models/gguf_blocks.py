"""The quantized blocks of a GGUF file as they are, without a round trip through float32: formats Q4_0, Q4_1 and Q8_0.

Each is blocks of 32 weights along the input axis:  weight = scale * value + minimum  (GGML: ggml-common.h)
    Q4_0   fp16 scale d, 16 bytes: weight = d * (q - 8)         so minimum = -8 d
    Q4_1   fp16 scale d, fp16 minimum m, 16 bytes: weight = d * q + m
    Q8_0   fp16 scale d, 32 int8: weight = d * q                so minimum = -128 d with q + 128 as the value
In the 16 bytes, value i is the low half of byte i and value 16 + i the high half. fp16 numbers widen to float32 without rounding.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sinkring.models.gguf_file import gguf_read_once

BLOCK = 32


@dataclass(frozen=True)
class GgufBlocks:
    """One matrix [N,K]. values: uint8 [N,K]; scales, minima: float32 [N,K/32]; kind: "Q4_0", "Q4_1" or "Q8_0"."""

    kind: str
    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32]

    @property
    def bits(self) -> int:
        return 8 if self.kind == "Q8_0" else 4

    def rows(self, order: NDArray[np.int64]) -> "GgufBlocks":
        """Its rows in another order: blocks lie along the other axis and stay whole."""
        return GgufBlocks(self.kind, self.values[order], self.scales[order], self.minima[order])

    def dequantized(self) -> NDArray[np.float32]:
        """float32 [N,K]."""
        rows, inputs = self.values.shape
        blocks = self.values.reshape(rows, -1, BLOCK) * self.scales[:, :, None] + self.minima[:, :, None]
        return np.asarray(blocks.reshape(rows, inputs), np.float32)


def read_gguf_blocks(path: Path, config: Any, parameters: Iterable[str]) -> dict[str, GgufBlocks]:
    """Those of `parameters`, names in the Hugging Face model of `config`, that are matrices in one of the formats above.

    Rows are in that model's order: llama.cpp pairs the rotary dimensions of Llama's queries and keys otherwise than transformers does.
    """
    import gguf

    with gguf_read_once():
        reader = gguf.GGUFReader(str(path))
    # The tensors' names are llama.cpp's; its own table goes the other way, from a model's names to them.
    names = gguf.get_tensor_name_map(_architecture(reader), config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for parameter in parameters:
        tensor = tensors.get(str(names.get_name(parameter, try_suffixes=(".weight",))))
        if tensor is None or tensor.tensor_type.name not in _READERS or len(tensor.shape) != 2:
            continue
        blocks = _READERS[tensor.tensor_type.name](np.asarray(tensor.data))
        if config.model_type == "llama":
            blocks = _unpaired(parameter, blocks, config)
        found[parameter] = blocks
    return found


def _architecture(reader: Any) -> Any:
    import gguf

    wanted = str(reader.fields["general.architecture"].contents())
    return next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)


def _unpaired(parameter: str, blocks: GgufBlocks, config: Any) -> GgufBlocks:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads or config.num_attention_heads}
    count = heads.get(parameter.split(".")[-2])
    if count is None:
        return blocks
    rows = np.arange(len(blocks.values)).reshape(count, -1, 2)
    return blocks.rows(rows.transpose(0, 2, 1).reshape(-1))


def _read_q4_0(data: NDArray[np.uint8]) -> GgufBlocks:
    blocks = data.reshape(len(data), -1, 18)
    scales = _half(blocks[:, :, 0:2])
    return GgufBlocks("Q4_0", _nibbles(blocks[:, :, 2:]), scales, -8 * scales)


def _read_q4_1(data: NDArray[np.uint8]) -> GgufBlocks:
    blocks = data.reshape(len(data), -1, 20)
    return GgufBlocks("Q4_1", _nibbles(blocks[:, :, 4:]), _half(blocks[:, :, 0:2]), _half(blocks[:, :, 2:4]))


def _read_q8_0(data: NDArray[np.uint8]) -> GgufBlocks:
    blocks = data.reshape(len(data), -1, 34)
    scales = _half(blocks[:, :, 0:2])
    # Of an int8, the sign bit turned over is 128 more, as uint8.
    return GgufBlocks("Q8_0", (blocks[:, :, 2:] ^ np.uint8(0x80)).reshape(len(data), -1), scales, -128 * scales)


_READERS = {"Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q8_0": _read_q8_0}


def _half(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [N,K/32,2], little-endian -> float32 [N,K/32]."""
    return np.ascontiguousarray(data).view("<f2")[:, :, 0].astype(np.float32)


def _nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [N,K/32,16] -> [N,K]."""
    return np.concatenate([data & np.uint8(0x0F), data >> np.uint8(4)], axis=2).reshape(len(data), -1)
