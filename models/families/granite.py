"""Granite: multipliers of embeddings, residuals, scores and logits."""

from sinkring.models.registry import Family

GRANITE = Family(name="granite", examples="Granite 3", special="multipliers of embeddings, residuals, scores and logits")
