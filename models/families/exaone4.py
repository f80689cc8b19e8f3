"""EXAONE 4: sliding-window layers that turn, full layers that do not."""

from sinkring.models.registry import Family

EXAONE4 = Family(
    name="exaone4", examples="EXAONE 4", special="rotary in sliding layers, NoPE in full ones, q/k norm", windows="some layers, if set"
)
