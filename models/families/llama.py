"""Llama 2 and 3, SmolLM2 and every other checkpoint of `model_type: llama`."""

from sinkring.models.registry import Family

LLAMA = Family(name="llama", examples="Llama 2 and 3, SmolLM2, TinyLlama")
