"""Arcee: a squared ReLU without a gate in the MLP."""

from sinkring.models.registry import Family

ARCEE = Family(name="arcee", examples="AFM 4.5B")
