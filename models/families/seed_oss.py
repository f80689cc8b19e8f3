"""Seed-OSS: biases on queries, keys and values."""

from sinkring.models.registry import Family

SEED_OSS = Family(name="seed_oss", examples="Seed-OSS 36B", special="biases of q, k, v")
