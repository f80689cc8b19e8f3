"""Folders as ModelOpt writes them: read packed, run as they are, and refused by name where they are not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sinkring.exporter.export import export_decoder
from sinkring.exporter.validate import validate_bundle
from sinkring.models.errors import UnsupportedModel
from sinkring.models.oracle import streaming_logits
from sinkring.models.source import load_model
from sinkring.runtime import open_bundle
from sinkring.runtime.errors import UnsupportedError
from sinkring.runtime.manifest import Manifest

from tests.models.tiny import tiny_llama

GROUP = 32
IDS = np.arange(3, 27)


def write_folder(folder: Path, algorithm: str, *, factors: bool = False, caches: str | None = None) -> torch.nn.Module:
    """A folder of packed weights, by loops over the definition of the format, and the float model that it stands for."""
    model = tiny_llama(heads=8, std=0.2)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith("proj.weight"):
            tensors[name] = parameter.half()
            parameter.copy_(tensors[name])
            continue
        rows, inputs = parameter.shape
        if algorithm == "W4A16_AWQ":
            values = torch.randint(-8, 8, (rows, inputs), generator=generator)
            scales = 0.02 + 0.05 * torch.rand((rows, inputs // GROUP), generator=generator)
            packed = torch.zeros((rows // 2, inputs), dtype=torch.uint8)
            for row in range(rows):
                packed[row // 2] |= ((values[row] % 16) << (4 * (row % 2))).to(torch.uint8)
            wide = torch.stack([scales[:, column // GROUP] for column in range(inputs)], 1)
        else:
            packed = (parameter * 100).to(torch.float8_e4m3fn)
            values, scales = packed.float(), torch.tensor(0.01 + 0.001 * (len(tensors) % 5))
            wide = scales
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
        tensors[name], tensors[f"{name}_scale"] = packed, scales
        parameter.copy_(values * wide)
        if factors and ("o_proj" in name or "down_proj" in name):
            factor = 0.5 + torch.rand(inputs, generator=generator)
            tensors[name.replace("weight", "pre_quant_scale")] = factor
            parameter.mul_(factor)
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": caches, "group_size": GROUP, "exclude_modules": ["lm_head"]}
    said = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_algo": algorithm, "quant_method": "modelopt", "producer": said["producer"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(("algorithm", "weights"), [("W4A16_AWQ", "int4"), ("FP8", "fp8")])
def test_packed_weights_run_as_they_are(algorithm: str, weights: Any, tmp_path: Path) -> None:
    right = write_folder(tmp_path / "model", algorithm, factors=weights == "int4")
    export_decoder(tmp_path / "model", tmp_path / "bundle", weights=weights, targets=["tensorrt-rtx"], sinks=2, window=6, chunk=3)
    stored = Manifest.read(tmp_path / "bundle").weights
    assert len(stored.taken_over) == 14
    assert stored.kept_fp32 == ("model.embed_tokens.weight", "lm_head.weight")
    expected = streaming_logits(right, torch.from_numpy(IDS), 2, 6).numpy()
    with open_bundle(tmp_path / "bundle") as decoder, decoder.stream() as stream:
        found = stream.feed(IDS, all_logits=True)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert validate_bundle(tmp_path / "bundle", 16).failures == ()


def test_factors_of_inputs_are_part_of_the_model(tmp_path: Path) -> None:
    right = write_folder(tmp_path, "W4A16_AWQ", factors=True)
    loaded = load_model(str(tmp_path))
    ids = torch.from_numpy(IDS)[None]
    expected = right(ids).logits
    assert torch.allclose(loaded.model(ids).logits, expected, atol=1e-4 * float(expected.abs().max()))
    # The control: without them it is another model.
    loaded.model.model.layers[0].mlp.down_proj.pre_quant_scale.fill_(1)
    assert (loaded.model(ids).logits - expected).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("algorithm", "caches", "words"),
    [("NVFP4", None, "quant_algo 'NVFP4' is not read; export it as one of W4A16_AWQ"), ("FP8", "FP8", "its caches are quantized, too")],
)
def test_what_is_not_read_is_refused(algorithm: str, caches: str | None, words: str, tmp_path: Path) -> None:
    write_folder(tmp_path, algorithm, caches=caches)
    with pytest.raises(UnsupportedModel, match=words):
        load_model(str(tmp_path))


def test_another_format_than_the_sources_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "FP8")
    with pytest.raises(UnsupportedError, match=r"proj\.weight in fp8: use weights fp8, or fp32"):
        export_decoder(tmp_path / "model", tmp_path / "out", weights="int4", targets=["tensorrt"], sinks=2, window=6, chunk=3)
