"""Qwen2: biases on queries, keys and values."""

from sinkring.models.registry import Family

QWEN2 = Family(name="qwen2", examples="Qwen2, Qwen2.5", special="biases of q, k, v", windows="some layers, if set")
