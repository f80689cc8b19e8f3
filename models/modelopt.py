"""Folders that NVIDIA ModelOpt exported: packed weights as they are, without a round trip through float32.

Formats, as nvidia-modelopt 0.47 writes them (`export_hf_checkpoint`): a Linear's `weight` is packed, `weight_scale` stands beside it.

    W4A16_AWQ  weight uint8 [N/2,K]: row 2i in the low half of a byte, 2i + 1 in the high one, signed; weight_scale [N,K/group_size]
    W8A16      weight int8 [N,K]; weight_scale [N]
    FP8        weight float8 e4m3 [N,K]; weight_scale one number. FP8_PER_CHANNEL_PER_TOKEN: weight_scale [N]

`input_scale`, by which ModelOpt's own kernels round a product's inputs in the FP8 formats, is not used: inputs stay as they are.
`pre_quant_scale` [K] of AWQ, by which the inputs of a product are multiplied, becomes part of the model.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from sinkring.models.errors import SourceError, UnsupportedModel

KINDS: dict[str, Literal["int4", "int8", "fp8"]] = {
    "W4A16_AWQ": "int4",
    "W8A16": "int8",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
_UNUSED = (".input_scale",)


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [N,K]. values: int8 [N,K] (of int4: -8 .. 7) or float8_e4m3fn [N,K]; scales: float32 [N,K/block]; block: K if not int4."""

    kind: Literal["int4", "int8", "fp8"]
    block: int
    values: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """float32 [N,K]."""
        rows, inputs = self.values.shape
        return (self.values.float().reshape(rows, -1, self.block) * self.scales[:, :, None]).reshape(rows, inputs)


@dataclass(frozen=True)
class ModelOptWeights:
    """state: float32, by name, packed weights dequantized. packed: by the name of the weight. input_factors: [K], by the Linear's name."""

    state: dict[str, torch.Tensor]
    packed: dict[str, PackedMatrix]
    input_factors: dict[str, torch.Tensor]


def read_algorithm(folder: Path) -> str | None:
    """What ModelOpt did to the model in `folder`, or None if it was not there. Raises UnsupportedModel for what is not read."""
    said: dict[str, Any] = {}
    for name, key in (("hf_quant_config.json", "quantization"), ("config.json", "quantization_config")):
        path = folder / name
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        ours = found if name == "hf_quant_config.json" else found.get(key) or {}
        if ours.get("producer", {}).get("name") == "modelopt" or ours.get("quant_method") == "modelopt":
            said = found[key]
            break
    if not said:
        return None
    algorithm, caches = said.get("quant_algo"), said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
    if algorithm not in KINDS:
        raise UnsupportedModel(f"{folder}: ModelOpt's quant_algo {algorithm!r} is not read; export it as one of {', '.join(KINDS)}")
    if caches:
        raise UnsupportedModel(
            f"{folder}: its caches are quantized, too ({caches}), which is not done here; export it without kv_cache_quant_algo"
        )
    return str(algorithm)


def read_modelopt(files: Iterable[Path], algorithm: str) -> ModelOptWeights:
    """The tensors of safetensors `files`. Raises SourceError for a packed weight whose scales are missing or do not fit."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  # it is no mapping
    packed, factors, used = {}, {}, set()
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        weight = name.removesuffix("_scale")
        if weight not in tensors:
            raise SourceError(f"{name}: there is no {weight} beside it; copy the folder again")
        packed[weight] = _unpack(weight, tensors[weight], tensors[name].float(), KINDS[algorithm])
        used.add(name)
    for name in [name for name in tensors if name.endswith(".pre_quant_scale")]:
        factors[name.removesuffix(".pre_quant_scale")] = tensors[name].float().reshape(-1)
        used.add(name)
    rest = {name: tensor for name, tensor in tensors.items() if name not in used and not name.endswith(_UNUSED)}
    if odd := [name for name, tensor in rest.items() if name not in packed and not tensor.dtype.is_floating_point]:
        raise SourceError(f"{odd[0]}: is {rest[odd[0]].dtype} without a weight_scale; copy the folder again")
    return ModelOptWeights(
        {name: packed[name].dequantized() if name in packed else tensor.float() for name, tensor in rest.items()}, packed, factors
    )


def multiply_inputs(network: torch.nn.Module, factors: dict[str, torch.Tensor]) -> None:
    """Let each Linear named in `factors` multiply its inputs by them, in place. Raises SourceError for a name that is none."""
    for name, factor in factors.items():
        try:
            linear = network.get_submodule(name)
        except AttributeError:
            raise SourceError(f"{name}.pre_quant_scale: the model has no such layer; copy the folder again") from None
        linear.register_buffer("pre_quant_scale", factor)
        linear.register_forward_pre_hook(_multiplied)


def _multiplied(linear: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    factor = linear.get_buffer("pre_quant_scale")
    return (inputs[0] * factor.to(inputs[0].dtype), *inputs[1:])


def _unpack(name: str, weight: torch.Tensor, scales: torch.Tensor, kind: Literal["int4", "int8", "fp8"]) -> PackedMatrix:
    expected = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
    if weight.dtype != expected or weight.dim() != 2:
        raise SourceError(f"{name}: is {weight.dtype} {tuple(weight.shape)}, expected a matrix of {expected}; copy the folder again")
    if kind == "int4":
        halves = torch.stack([weight & 15, weight >> 4], dim=1).to(torch.int8)
        values = torch.where(halves > 7, halves - 16, halves).reshape(-1, weight.shape[1])
    else:
        values = weight
    rows, inputs = values.shape
    if kind != "int4":
        scales = scales.reshape(-1, 1).expand(rows, 1) if scales.numel() == 1 else scales.reshape(-1, 1)
    if scales.dim() != 2 or scales.shape[0] != rows or inputs % scales.shape[1]:
        raise SourceError(f"{name}: has {rows} rows of {inputs} and scales {tuple(scales.shape)}; copy the folder again")
    return PackedMatrix(kind, inputs // scales.shape[1], values.contiguous(), scales.contiguous())
