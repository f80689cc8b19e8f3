"""GGUF files of tiny Llamas, written with the format's own package, in float32 or in its quantized blocks."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import LlamaForCausalLM


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    kind: Callable[[str], str] = lambda name: "F32",
    **text: str,
) -> None:
    """`model` as a GGUF file, with the rows of q and k in the order of that format. kind: of a tensor's name there, its quantization."""
    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in text.items():
        writer.add_string(key.replace("__", "."), value)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
            target = f"blk.{match[1]}.{names[match[2]]}.weight"
            if match[2] in ("self_attn.q_proj", "self_attn.k_proj"):
                array = array.reshape(-1, 2, config.head_dim // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        else:
            target = top[name]
        wanted = GGMLQuantizationType[kind(target) if array.ndim == 2 else "F32"]
        array = quants.quantize(np.ascontiguousarray(array), wanted)
        writer.add_tensor(target, array, raw_dtype=wanted)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
