"""Qwen3-MoE: Qwen3 with a mixture of experts."""

from sinkring.models.registry import Family

QWEN3_MOE = Family(name="qwen3_moe", examples="Qwen3-30B-A3B", special="q/k norm, mixture of experts", windows="all layers, if set")
