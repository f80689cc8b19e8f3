"""Mistral: one sliding window for all layers, where the configuration has one."""

from sinkring.models.registry import Family

MISTRAL = Family(name="mistral", examples="Mistral 7B, Mistral Nemo", windows="all layers, if set")
