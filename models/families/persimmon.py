"""Persimmon: part of each head turns, queries and keys normalized."""

from sinkring.models.registry import Family

PERSIMMON = Family(name="persimmon", examples="Persimmon 8B", special="partial rotary, q/k norm", partial=True)
