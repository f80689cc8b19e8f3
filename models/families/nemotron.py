"""Nemotron: part of each head turns, norms whose weights count from one, a squared ReLU."""

from sinkring.models.registry import Family

NEMOTRON = Family(name="nemotron", examples="Nemotron-4, Minitron", special="partial rotary", partial=True)
