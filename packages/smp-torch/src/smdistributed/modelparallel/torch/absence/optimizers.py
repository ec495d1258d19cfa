"""Optimizers update what is here: a parameter of another partition has no gradient for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from smdistributed.modelparallel.torch.absence.tensors import hide_gradients


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
