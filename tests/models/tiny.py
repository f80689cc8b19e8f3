"""Tiny random decoders for tests: seconds to run, yet with logits whose scale is that of a trained model."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    vocab: int = 97,
    tied: bool = False,
    std: float = 0.3,
    **config: Any,
) -> LlamaForCausalLM:
    """A Llama in float32, eval mode, without gradients, its weights drawn from `seed` alone (the global generator is not touched).

    Matrices and biases are normal with deviation `std`, norm weights normal around 1: at the usual initialization of 0.02 all logits are
    so small that a wrong attention passes any tolerance. `config` overrides fields of LlamaConfig.
    """
    settings: dict[str, Any] = {
        "hidden_size": heads * head_dim,
        "intermediate_size": 2 * heads * head_dim,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                vocab_size=vocab,
                tie_word_embeddings=tied,
                **settings,
            )
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            weight.copy_(around + std * torch.randn(weight.shape, generator=generator))
    return model.float().eval().requires_grad_(False)
