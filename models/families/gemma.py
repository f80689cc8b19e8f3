"""Gemma: scaled embeddings, and norms whose weights count from one."""

from sinkring.models.registry import Family

GEMMA = Family(name="gemma", examples="Gemma 2B, 7B", special="scaled embeddings")
