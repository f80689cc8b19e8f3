"""Starcoder2: biases, LayerNorm, a sliding window for all layers."""

from sinkring.models.registry import Family

STARCODER2 = Family(name="starcoder2", examples="Starcoder2", special="biases, LayerNorm", windows="all layers, if set")
