"""Blocks of a GGUF file: the very numbers that transformers dequantizes, under the names and in the row order of its model."""

from pathlib import Path

import numpy as np
import pytest
from sinkring.models.gguf_blocks import read_gguf_blocks
from sinkring.models.source import load_model

from tests.models.tiny import tiny_llama
from tests.models.write_gguf import write_gguf


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_the_weights_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), kind=lambda name: kind)
    loaded = load_model(str(path))
    matrices = {name: weight.numpy() for name, weight in loaded.model.named_parameters() if weight.dim() == 2}
    blocks = read_gguf_blocks(path, loaded.config, matrices)
    assert blocks.keys() == matrices.keys()
    for name, weight in matrices.items():
        np.testing.assert_array_equal(blocks[name].dequantized(), weight, err_msg=name)
        assert blocks[name].values.max() < 1 << blocks[name].bits


def test_without_the_row_order_queries_would_differ(tmp_path: Path) -> None:
    """The control of the test above: it can tell rows apart."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), kind=lambda name: "Q8_0")
    loaded = load_model(str(path))
    name = "model.layers.0.self_attn.q_proj.weight"
    right = read_gguf_blocks(path, loaded.config, [name])[name]
    paired = np.arange(len(right.values)).reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1)
    assert not np.array_equal(right.rows(paired).dequantized(), right.dequantized())


def test_formats_that_are_not_read_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), kind=lambda name: "Q5_0" if "attn_v" in name else "Q8_0")
    names = [f"model.layers.0.self_attn.{matrix}.weight" for matrix in ("k_proj", "v_proj")]
    assert list(read_gguf_blocks(path, load_model(str(path)).config, names)) == names[:1]
