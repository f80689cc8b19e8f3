"""Helium: interleaved pairs."""

from sinkring.models.registry import Family

HELIUM = Family(name="helium", examples="Helium 1 2B", special="interleaved rotary", interleaved=True)
