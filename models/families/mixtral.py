"""Mixtral: a mixture of experts behind each attention."""

from sinkring.models.registry import Family

MIXTRAL = Family(name="mixtral", examples="Mixtral 8x7B, 8x22B", special="mixture of experts", windows="all layers, if set")
