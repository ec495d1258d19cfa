"""Optimizers update what is here: a parameter of another partition has no gradient for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from smdistributed.modelparallel.torch.absence.tensors import (
    AbsentTensor,
    clear_gradient,
    gradients_hidden,
    hide_gradients,
)


@contextlib.contextmanager
def gradients_hidden_from_optimizers() -> Iterator[None]:
    """Hides the gradients of absent parameters in every ``step``, as long as it is entered.

    A step that fails leaves them hidden until the next call of a step function.
    """

    def hide(*_: Any) -> None:
        hide_gradients(True)

    def show(*_: Any) -> None:
        hide_gradients(False)

    handles = register_optimizer_step_pre_hook(hide), register_optimizer_step_post_hook(show)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def cleared_unseen(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Takes the gradients of absent parameters away, and shows none of them inside.

    One that nobody has seen is not made for it: that takes longer than all that is cleared.
    """
    for parameter in parameters:
        if isinstance(parameter, AbsentTensor):
            clear_gradient(parameter)
    with gradients_hidden():
        yield


def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
    """Calls an optimizer's ``zero_grad``."""
    is_torchs = type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad
    if not (set_to_none and is_torchs):
        optimizer.zero_grad(set_to_none)
        return
    with cleared_unseen(each for group in optimizer.param_groups for each in group["params"]):
        optimizer.zero_grad(set_to_none)
