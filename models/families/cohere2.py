"""Cohere 2: Cohere whose sliding-window layers turn and whose full layers do not."""

from sinkring.models.registry import Family

COHERE2 = Family(
    name="cohere2",
    examples="Command R7B, Command A",
    special="interleaved rotary in sliding layers, NoPE in full ones, logit scale",
    windows="some layers",
    interleaved=True,
)
