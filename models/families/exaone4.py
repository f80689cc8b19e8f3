"""EXAONE 4: sliding-window layers that turn, full layers that do not."""

from sinkring.models.registry import Family

EXAONE4 = Family(name="exaone4", examples="EXAONE 4")
