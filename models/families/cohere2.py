"""Cohere 2: Cohere whose sliding-window layers turn and whose full layers do not."""

from sinkring.models.registry import Family

COHERE2 = Family(name="cohere2", examples="Command R7B, Command A", interleaved=True)
