"""Qwen2-MoE: Qwen2 with a mixture of experts, one of them shared."""

from sinkring.models.registry import Family

QWEN2_MOE = Family(
    name="qwen2_moe",
    examples="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    special="biases of q, k, v, mixture of experts",
)
