"""Optimizers update what is here: a parameter of another partition has no gradient for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
    """Calls an optimizer's ``zero_grad``; gradients that nobody has seen are not made for it."""
    is_torchs = type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad
    if not (set_to_none and is_torchs):
        optimizer.zero_grad(set_to_none)
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if isinstance(parameter, AbsentTensor):
            clear_gradient(parameter)
    with gradients_hidden():
        optimizer.zero_grad(set_to_none)
