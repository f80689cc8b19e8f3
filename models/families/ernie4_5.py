"""ERNIE 4.5, dense: interleaved pairs."""

from sinkring.models.registry import Family

ERNIE4_5 = Family(name="ernie4_5", examples="ERNIE 4.5 0.3B", special="interleaved rotary", interleaved=True)
