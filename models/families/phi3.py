"""Phi-3: one product for queries, keys and values; longrope in the long-context checkpoints."""

from sinkring.models.registry import Family

PHI3 = Family(
    name="phi3",
    examples="Phi-3, Phi-3.5, Phi-4-mini",
    special="longrope, partial rotary (Phi-4-mini)",
    windows="all layers, if set",
    partial=True,
)
