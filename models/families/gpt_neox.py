"""GPT-NeoX and Pythia: parallel residual, part of each head turns."""

from sinkring.models.registry import Family

GPT_NEOX = Family(
    name="gpt_neox",
    examples="Pythia, GPT-NeoX-20B",
    special="partial rotary, parallel residual",
    partial=True,
    layers="gpt_neox.layers",
    attention="attention",
    rotary="gpt_neox.rotary_emb",
)
