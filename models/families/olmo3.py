"""OLMo 3: OLMo 2 with sliding-window layers."""

from sinkring.models.registry import Family

OLMO3 = Family(name="olmo3", examples="OLMo 3", special="q/k norm, rotary of each kind of layer", windows="some layers")
