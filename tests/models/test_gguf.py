"""GGUF files: every kind of quantization and every family that is read, against what the file holds; and what would be lost is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from sinkring.models.errors import UnsupportedModel
from sinkring.models.gguf_file import gguf_read_once
from sinkring.models.gguf_settings import check_gguf_settings
from sinkring.models.source import load_model
from transformers import LlamaConfig

from tests.models.gguf_case import KINDS, Kind, write_gguf
from tests.models.tiny import tiny_llama
from tests.models.tiny_families import tiny_model

IDS = torch.arange(3, 23)[None]
# Of each family the settings that its class takes for granted, since the file has no place for them.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 256,
            "layer_types": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 4096}),
    "stablelm": ("stablelm", {"qk_layernorm": False, "use_qkv_bias": True, "use_parallel_residual": False}),
    "bloom": ("bloom", {}),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_quantization(tmp_path: Path, kind: Kind) -> None:
    model = tiny_llama(heads=4, kv_heads=2, head_dim=64, layers=1, tied=kind == Kind.Q4_0)
    there = write_gguf(tmp_path / "tiny.gguf", model, "llama", kind)
    loaded = load_model(str(tmp_path / "tiny.gguf")).model.state_dict()
    for name, truth in there.items():
        assert torch.equal(loaded[name], truth), name
    # Quantized means changed, or nothing was shown.
    assert kind == Kind.F32 or not torch.equal(there["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight)
    # The rows of q are not in the order in which the file has them.
    assert len(set(there) & set(loaded)) == len(there)


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family(tmp_path: Path, arch: str) -> None:
    row, settings = FAMILIES[arch]
    model = tiny_model(row, **settings)
    model.set_attn_implementation("eager")
    # Phi-3's class takes a padding token for granted that this vocabulary lacks.
    write_gguf(tmp_path / "tiny.gguf", model, arch, keys={"tokenizer.ggml.padding_token_id": 0})
    loaded = load_model(str(tmp_path / "tiny.gguf"))
    assert loaded.architecture == row
    expected = model(IDS).logits
    assert float((loaded.model(IDS).logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


LOST = [
    ("llama", {"rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = 'yarn' is lost"),
    ("llama", {"rope.scaling.factor": 4.0}, "rope.scaling.factor = 4"),
    ("llama", {"expert_count": 8}, "expert_count = 8"),
    ("llama", {"attention.key_length": 16}, "key_length = 16"),
    ("llama", {"logit_scale": 0.5}, "logit_scale = 0.5"),
    ("llama", {"attention.sliding_window": 64}, "sliding_window = 64"),
    ("llama", {"attention.sinks_of_its_own": 3}, "sinks_of_its_own = 3"),
    ("llama", {"attention.causal": False}, "causal = False"),
    ("llama", {"attention.scale": 0.5}, r"attention\.scale = 0\.5"),
    ("llama", {"general.type": "adapter"}, "of type 'adapter'"),
    ("qwen3", {"attention.key_length": 64}, "key_length = 64"),
    ("gemma2", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping = 20"),
    ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping = 0"),
    ("gemma3", {"rope.scaling.type": "linear"}, "'linear' is lost"),
    ("phi3", {"attention.sliding_window": 100}, "sliding_window = 100"),
    ("starcoder2", {}, "vocab_size = 97"),
    ("starcoder2", {"vocab_size": None, "rope.freq_base": 1e5}, "freq_base = 100000"),
    ("stablelm", {"rope.dimension_count": 4}, "dimension_count = 4"),
]


@pytest.mark.parametrize(("arch", "keys", "match"), LOST, ids=lambda value: str(value)[:40])
def test_what_would_be_lost_is_refused_by_name(tmp_path: Path, arch: str, keys: dict[str, Any], match: str) -> None:
    row, settings = FAMILIES.get(arch, (arch, {}))
    write_gguf(tmp_path / "tiny.gguf", tiny_model(row, **settings), arch, keys=keys)
    with pytest.raises(UnsupportedModel, match=match):
        load_model(str(tmp_path / "tiny.gguf"))


HARMLESS = {
    "attention.sliding_window": 1024,
    "attention.causal": True,
    "rope.scaling.type": "none",
    "attention.key_length": 8,
    "attention.value_length": 8,
    "expert_count": 0,
    "tensor_data_layout": "Meta AI original pth",
}


def test_what_changes_nothing_is_taken(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "llama", keys=HARMLESS)
    load_model(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_v.bias", "blk.1.attn_sub_norm.weight"])
def test_a_tensor_that_would_be_passed_over_is_refused(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "llama", extra={name: np.ones(4, np.float32)})
    with pytest.raises(UnsupportedModel, match=f"1 of its tensors, the first is {name}, are lost"):
        load_model(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_a_scale_that_the_file_does_not_say(arch: str, layers: int) -> None:
    check_gguf_settings("x.gguf", arch, {}, LlamaConfig(num_hidden_layers=26))
    with pytest.raises(UnsupportedModel, match=r"x\.gguf: gemma.: its attention scale, that of the 27B model, is not in the file"):
        check_gguf_settings("x.gguf", arch, {}, LlamaConfig(num_hidden_layers=layers))


def test_an_architecture_that_is_not_read() -> None:
    for arch in ("gpt-oss", "mistral"):
        with pytest.raises(UnsupportedModel, match=rf"x\.gguf: {arch}: transformers .*; give the model's safetensors folder"):
            check_gguf_settings("x.gguf", arch, {}, LlamaConfig())


def test_what_is_read_quickly_is_what_the_package_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "llama", Kind.F32)
    usual = gguf.GGUFReader(tmp_path / "tiny.gguf")
    with gguf_read_once():
        quick = gguf.GGUFReader(tmp_path / "tiny.gguf")
        assert gguf.GGUFReader(tmp_path / "tiny.gguf") is quick
    assert isinstance(usual.fields["general.architecture"].parts[0], np.memmap), "or there was nothing to make quicker"
    assert not any(isinstance(part, np.memmap) for field in quick.fields.values() for part in field.parts)
    assert {name: field.contents() for name, field in quick.fields.items()} == {n: field.contents() for n, field in usual.fields.items()}
    for one, other in zip(quick.tensors, usual.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        assert np.array_equal(one.data, other.data)
