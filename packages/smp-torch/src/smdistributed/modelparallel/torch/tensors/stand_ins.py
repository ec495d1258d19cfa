"""What stands for functions that PyTorch cannot run on fakes, though nothing hinders it.

They look at values, but the shape of what they return does not depend on them; or they use up what
later microbatches, which share the fakes, need as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Takes (T, N, C) or (T, C); gives (N,) or () without a reduction, else ()."""
    of_each = log_probs.sum((0, -1))
    return of_each if reduction == "none" else of_each.sum()


def _grad(*args: Any, **kwargs: Any) -> Any:
    """Takes and gives what ``torch.autograd.grad`` does, and keeps the graph."""
    given = _SIGNATURE_OF_GRAD.bind(*args, **kwargs)
    given.arguments["retain_graph"] = True
    return torch.autograd.grad(*given.args, **given.kwargs)


_SIGNATURE_OF_GRAD = inspect.signature(torch.autograd.grad)
#: Function of PyTorch -> one of the same signature whose result has the same shape and gradient.
STAND_INS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.ctc_loss: _ctc_loss,
    torch.autograd.grad: _grad,
}
