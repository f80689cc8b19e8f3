"""SmolLM3: every fourth layer turns nothing (NoPE)."""

from sinkring.models.registry import Family

SMOLLM3 = Family(name="smollm3", examples="SmolLM3", special="NoPE in every fourth layer", windows="some layers, if set")
