"""The gradients that are compared where slices of all ranks are tried in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan


def is_differentiated(arguments: Any) -> bool:
    """Whether there is a gradient of the first argument."""
    tensors = Call(arguments).tensors
    return bool(tensors) and tensors[0].is_floating_point() and torch.is_grad_enabled()


def sources_of(module: nn.Module, plan: Plan, arguments: Any) -> list[torch.Tensor]:
    """Returns what gradients are compared of: the first argument, and what every rank has whole.

    Code may change the gradient of such a parameter alone, as a function with a backward of its
    own that is given it. The argument gets a gradient from here on.
    """
    if not torch.is_grad_enabled():
        return []
    whole = dict(plan.partly)
    split = [
        f"{name}."
        for name in (*plan.columns, *plan.rows, *plan.attentions)
        if name and name not in whole
    ]
    found: list[torch.Tensor] = [
        each
        for name, each in module.named_parameters()
        if each.requires_grad and "" not in plan.attentions and not name.startswith(tuple(split))
    ]
    if is_differentiated(arguments):
        return [Call(arguments).tensors[0].requires_grad_(), *found]
    return found


def gradients_of(
    sources: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Returns the gradients of the sum of what some results weigh.

    Raises:
        RefutedError: the backward pass fails, as where it computes slices again.
    """
    pairs = [pair for pair in zip(results, weights, strict=True) if pair[0].requires_grad]
    if not pairs or not sources:
        return [torch.zeros_like(each) for each in sources]
    of, by = zip(*pairs, strict=True)
    try:
        found = torch.autograd.grad(of, sources, by, allow_unused=True)
    except SMPError as error:
        raise RefutedError(
            "its backward pass calls what is split, as one of a function of its own may do"
        ) from error
    except Exception as error:  # any code may run here
        first = (str(error).splitlines() or [""])[0]
        raise RefutedError(f"its backward pass fails: {type(error).__name__}: {first}") from error
    made = zip(found, sources, strict=True)
    return [torch.zeros_like(each) if got is None else got for got, each in made]
