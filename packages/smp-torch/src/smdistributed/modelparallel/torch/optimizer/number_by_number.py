"""Which optimizers update each number of a parameter by itself, so that blocks can be updated."""

from __future__ import annotations

import inspect

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.optimizers.fused_adam import FusedAdam

#: By their updates, without what torch wraps around them when one is made. A class that is derived
#: from one, and has its update, is as good.
_KNOWN = tuple(
    inspect.unwrap(kind.step)
    for kind in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    )
)


def is_number_by_number(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update each number by itself."""
    kind = type(optimizer)
    is_known = inspect.unwrap(kind.step) in _KNOWN or isinstance(optimizer, FusedAdam)
    return is_known or getattr(kind, "updates_number_by_number", False)


def check_number_by_number(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Raises if an optimizer may look at a parameter as a whole, which no rank has.

    Args:
        optimizer: of the script.
        why: no rank has it.

    Raises:
        UnsupportedError: its update is not one that is known.
    """
    if is_number_by_number(optimizer):
        return
    raise UnsupportedError(
        f"{why}, and {type(optimizer).__name__} may need whole ones, as those do that take norms "
        "or means: use AdamW, SGD or another one of torch that works number by number. If this one "
        "does, say so by the attribute updates_number_by_number = True of its class."
    )
