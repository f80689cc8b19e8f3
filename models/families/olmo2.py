"""OLMo 2: norms after attention and MLP, queries and keys normalized."""

from sinkring.models.registry import Family

OLMO2 = Family(name="olmo2", examples="OLMo 2", special="q/k norm, norms after attention and MLP")
