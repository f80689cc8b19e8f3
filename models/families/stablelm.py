"""StableLM: part of each head turns."""

from sinkring.models.registry import Family

STABLELM = Family(
    name="stablelm", examples="StableLM 2, StableLM Zephyr", special="partial rotary, q/k norm, parallel residual", partial=True
)
