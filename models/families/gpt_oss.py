"""gpt-oss: a learned sink logit for each head, sliding-window and full layers in turn, a mixture of experts."""

from sinkring.models.registry import BY_HEAD, Family

GPT_OSS = Family(
    name="gpt_oss", examples="gpt-oss 20B, 120B", special="learned sink logits, mixture of experts", windows="some layers", plan=BY_HEAD
)
