"""Granite MoE: Granite with a mixture of experts."""

from sinkring.models.registry import Family

GRANITEMOE = Family(name="granitemoe", examples="Granite 3 1B-A400M, 3B-A800M", special="multipliers as Granite, mixture of experts")
