"""Architectures that can be no stream: refused by name and with the reason, before a weight is read."""

import json
from pathlib import Path

import pytest
from sinkring.models.errors import UnsupportedModel
from sinkring.models.refused import REFUSED
from sinkring.models.registry import families
from sinkring.models.source import load_model

REASONS = {
    "gpt2": "positions are learned",
    "opt": "positions are learned",
    "mamba": "recurrent state",
    "qwen3_next": "recurrent state",
    "deepseek_v3": "MLA",
    "t5": "cross-attention",
    "whisper": "cross-attention",
    "llama4": "fixed chunks",
    "csm": "several audio codebooks",
    "voxtral": "in the place of tokens",
}


@pytest.mark.parametrize(("architecture", "reason"), REASONS.items())
def test_it_is_refused_from_its_config_alone(tmp_path: Path, architecture: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModel, match=rf"architecture '{architecture}' cannot be a stream: .*{reason}.*; use "):
        load_model(str(tmp_path))


def test_nothing_is_both_exported_and_refused() -> None:
    assert not set(REFUSED) & set(families())
