"""Gemma 2: capped scores and logits, sliding-window and full layers in turn."""

from sinkring.models.registry import BY_HEAD, Family

GEMMA2 = Family(
    name="gemma2",
    examples="Gemma 2 2B, 9B, 27B",
    special="softcaps of scores and logits, own attention scale",
    windows="some layers",
    plan=BY_HEAD,
)
