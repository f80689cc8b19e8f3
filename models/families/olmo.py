"""OLMo: norms without weights, clipped queries, keys and values."""

from sinkring.models.registry import Family

OLMO = Family(name="olmo", examples="OLMo 1B, 7B", special="norms without weights, clipped q, k, v")
