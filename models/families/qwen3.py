"""Qwen3: queries and keys are normalized."""

from sinkring.models.registry import Family

QWEN3 = Family(name="qwen3", examples="Qwen3", special="q/k norm", windows="some layers, if set")
