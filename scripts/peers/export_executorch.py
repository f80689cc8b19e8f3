"""SmolLM2 as an ExecuTorch program with attention sink, for XNNPACK. Runs in ExecuTorch's environment.

export_executorch.py HUGGING_FACE_FOLDER OUT fp32|8da4w WINDOW CONFIG_JSON
"""

import json
import sys
from pathlib import Path

import torch
from executorch.examples.models.llama.export_llama_lib import export_llama
from executorch.extension.llm.export.config.llm_config import LlmConfig, ModelType
from safetensors.torch import load_file

# Hugging Face's name of a layer's weight -> Meta's.
_LAYER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main() -> None:
    source, out, precision, window, config = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5])
    torch.save(meta_weights(load_file(source / "model.safetensors")), out / "weights.pth")
    (out / "params.json").write_text(json.dumps(meta_parameters(config)), encoding="utf-8")
    llm = LlmConfig()
    llm.base.model_class = ModelType.smollm2
    llm.base.checkpoint, llm.base.params = str(out / "weights.pth"), str(out / "params.json")
    llm.base.metadata = json.dumps({"get_bos_id": 1, "get_eos_ids": [2]})
    llm.model.use_kv_cache = llm.model.use_sdpa_with_kv_cache = llm.model.enable_dynamic_shape = True
    llm.model.use_attention_sink = f"4,{window}"
    # The table of angles, which its ring of twice the window indexes; a call takes up to max_seq_length tokens.
    llm.export.max_context_length, llm.export.max_seq_length = 8192, window
    llm.export.output_name = str(out / "model.pte")
    llm.backend.xnnpack.enabled = llm.backend.xnnpack.extended_ops = True
    if precision != "fp32":
        llm.quantization.qmode, llm.quantization.group_size, llm.quantization.embedding_quantize = precision, 32, "8,0"
    export_llama(llm)
    (out / "weights.pth").unlink()


def meta_parameters(config: dict) -> dict[str, object]:
    rope = config.get("rope_parameters") or {}
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "hidden_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", config.get("rope_theta")),
        "use_scaled_rope": False,
        # The rows of q and k stay in Hugging Face's order.
        "use_hf_rope": True,
    }


def meta_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {"tok_embeddings.weight": weights["model.embed_tokens.weight"], "norm.weight": weights["model.norm.weight"]}
    renamed["output.weight"] = weights.get("lm_head.weight", renamed["tok_embeddings.weight"])
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            renamed[f"layers.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"] = weight
    return renamed


if __name__ == "__main__":
    main()
