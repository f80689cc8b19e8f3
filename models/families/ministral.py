"""Ministral: sliding-window and full layers in turn."""

from sinkring.models.registry import Family

MINISTRAL = Family(name="ministral", examples="Ministral 8B", windows="some layers")
