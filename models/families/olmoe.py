"""OLMoE: OLMo 2's normalized queries and keys with a mixture of experts."""

from sinkring.models.registry import Family

OLMOE = Family(name="olmoe", examples="OLMoE 1B-7B", special="q/k norm, mixture of experts")
