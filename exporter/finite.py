"""A weight that is not finite makes every logit NaN, which a stream would only say at its first token: it is refused before the trace."""

import torch
from sinkring.runtime.errors import UnsupportedError


def check_finite(model: torch.nn.Module) -> None:
    """Raises UnsupportedError, by its name, for the first weight of `model` that holds NaN or an infinity."""
    for name, weight in model.named_parameters():
        wrong = weight.numel() - int(torch.isfinite(weight).sum())
        if wrong:
            raise UnsupportedError(
                f"{name}: {wrong} of its {weight.numel()} weights are NaN or infinite; copy the model again, or another one"
            )
