"""Cohere: interleaved pairs, parallel residual, scaled logits."""

from sinkring.models.registry import Family

COHERE = Family(name="cohere", examples="Command R", special="interleaved rotary, logit scale, parallel residual", interleaved=True)
