"""Gemma 3, its text decoder: five local layers to a global one, each kind with a rotary base of its own."""

from sinkring.models.registry import Family

GEMMA3_TEXT = Family(
    name="gemma3_text", examples="Gemma 3 270M, 1B", special="5 local layers : 1 global, two rotary bases, q/k norm", windows="some layers"
)
