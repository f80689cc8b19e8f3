"""Phi: parallel residual, part of each head turns."""

from sinkring.models.registry import Family

PHI = Family(name="phi", examples="Phi-1, Phi-1.5, Phi-2", special="partial rotary, q/k norm, parallel residual", partial=True)
