"""Mixtures of experts in static shapes: transformers' own loop visits the experts that were chosen, and a graph cannot.

A few tokens read the weights of the experts that they chose; many choose nearly all of them, so all are read once.
"""

from typing import Any

import torch
from torch import Tensor


def run_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden [N,hidden], chosen int64 [N,k] of E experts, weights [N,k] -> [N,hidden]. module: experts of transformers."""
    tokens, count = hidden.shape[0], chosen.shape[-1]
    if isinstance(tokens, int) and tokens * count < module.num_experts:
        return _chosen_experts(module, hidden, chosen, weights)
    return _all_experts(module, hidden, chosen, weights)


def _chosen_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    tokens, count = chosen.shape
    which = chosen.reshape(-1)
    each = hidden[:, None].expand(tokens, count, hidden.shape[-1]).reshape(tokens * count, 1, hidden.shape[-1])
    out = _experts(module, each, lambda weight: torch.index_select(weight, 0, which))  # [N*k,1,hidden]
    return (out.reshape(tokens, count, -1) * weights[..., None]).sum(1).to(hidden.dtype)


def _all_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = _experts(module, hidden[None], lambda weight: weight)  # [E,N,hidden]
    picked = chosen[..., None] == torch.arange(module.num_experts)  # [N,k,E]
    share = (picked.to(weights.dtype) * weights[..., None]).sum(1)  # [N,E]
    return (out * share.transpose(0, 1)[..., None]).sum(0).to(hidden.dtype)


def _experts(module: Any, x: Tensor, pick: Any) -> Tensor:
    """x [1 or n,N,hidden] through the n experts that `pick` takes of each stacked weight -> [n,N,hidden]."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    out = _product(module, x, up, pick)
    return _product(module, module._apply_gate(out) if module.has_gate else module.act_fn(out), "down_proj", pick)


def _product(module: Any, x: Tensor, name: str, pick: Any) -> Tensor:
    weight = pick(getattr(module, name))
    # Weights lie as [n,in,out] or [n,out,in]; in the second case the small side is turned, not the weights.
    out = x @ weight if module.is_transposed else (weight @ x.transpose(1, 2)).transpose(1, 2)
    return out + pick(getattr(module, f"{name}_bias"))[:, None] if module.has_bias else out
