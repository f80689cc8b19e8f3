"""GLM: interleaved pairs, part of each head turns."""

from sinkring.models.registry import Family

GLM = Family(name="glm", examples="GLM-4 9B (2024)", special="partial, interleaved rotary", partial=True, interleaved=True)
