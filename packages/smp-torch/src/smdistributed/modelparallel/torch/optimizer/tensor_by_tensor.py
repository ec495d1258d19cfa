"""Which optimizers update a parameter by its own gradient alone, found by trying them.

Where ranks have the gradients of some parameters each, an optimizer that looks at all of them (to
clip them by their norm, or to climb along them) would see a part, and differ from rank to rank.
What optimizers do is their code's affair; so a copy of one updates small parameters twice, with
another gradient for the last of them, and the others must not notice.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.gradients.norm import norms_of_one
from smdistributed.modelparallel.torch.optimizers.base import FusedOptimizer

logger = logging.getLogger(__name__)

_STEPS = 3
#: Of each dim of a small parameter.
_MOST_CHANNELS = 3
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def check_tensor_by_tensor(
    optimizer: torch.optim.Optimizer, why: str, *, has_whole_norms: bool
) -> None:
    """Raises if the update of a parameter depends on the gradients of others.

    Args:
        optimizer: of the script.
        why: no rank has all gradients.
        has_whole_norms: torch's own functions give it the norm of all gradients, so that it may
            depend on that.

    Raises:
        UnsupportedError: it does.
    """
    if depends_on_others(optimizer, why, has_whole_norms=has_whole_norms):
        raise UnsupportedError(
            f"{why}, and {type(optimizer).__name__} updates a parameter by the gradients of others "
            "too, as was found by trying it: use an optimizer that updates each parameter by its "
            "own gradient, and clip by torch.nn.utils.clip_grad_norm_ before its step. If it only "
            "seems so, say so by the attribute updates_tensor_by_tensor = True of its class."
        )


def depends_on_others(optimizer: torch.optim.Optimizer, why: str, *, has_whole_norms: bool) -> bool:
    """Whether the update of a parameter depends on the gradients of others.

    The optimizer itself, its parameters and its state are not touched. One that cannot be tried is
    let pass, with a warning. For the arguments see ``check_tensor_by_tensor``.
    """
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):  # which climbs along all of them
        return True
    if kind.__module__.startswith("torch.optim.") or isinstance(optimizer, FusedOptimizer):
        return False
    if getattr(kind, "updates_tensor_by_tensor", False):
        return False
    try:
        with norms_of_one() if has_whole_norms else contextlib.nullcontext():
            return _depends_on_others(optimizer)
    except Exception as error:  # whatever its code raises on small parameters of a host
        logger.warning(
            "%s could not be tried on small tensors (%s: %s). If its update of a parameter depends "
            "on the gradients of others, it is wrong here: %s.",
            kind.__name__,
            type(error).__name__,
            str(error).partition("\n")[0],
            why,
        )
        return False


def _depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    one, other = (_updated(optimizer, of_last)[:-1] for of_last in (1.0, 100.0))
    if one and not any(each.isfinite().any() for each in one):
        raise ArithmeticError("it makes no finite numbers of them")
    # Some have no numbers for so small tensors, as the deviation of a single one.
    return any(
        not torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True)
        for mine, theirs in zip(one, other, strict=True)
    )


def _updated(optimizer: torch.optim.Optimizer, of_last: float) -> list[torch.Tensor]:
    """Returns small parameters after some updates, with a factor of the last one's gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        memo: dict[int, Any] = {}
        small = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                memo[id(parameter)] = _small(parameter)
                small.append(memo[id(parameter)])
        own = _copied(optimizer, memo)
        trained = [each for each in small if each.requires_grad]
        for _ in range(_STEPS):
            gradients = [torch.randn_like(each) for each in trained]
            if gradients:
                gradients[-1] *= of_last
            _update(own, trained, gradients)
        return [each.detach() for each in trained]


def _small(parameter: torch.Tensor) -> nn.Parameter:
    shape = [min(size, _MOST_CHANNELS) for size in parameter.shape]
    numbers = torch.randn(shape, dtype=parameter.dtype, device="cpu")
    return nn.Parameter(numbers, requires_grad=parameter.requires_grad)


def _update(
    optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], gradients: list[torch.Tensor]
) -> None:
    def give() -> torch.Tensor:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient.clone()
        return torch.ones(())

    step: Callable[..., Any] = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch, for hooks and profiles
        step = step.__wrapped__  # type: ignore[attr-defined]
    give()
    before = [each.detach().clone() for each in trained]
    try:
        step(optimizer)
    except Exception:  # that it needs a closure it says in its own words
        with torch.no_grad():
            for parameter, number in zip(trained, before, strict=True):
                parameter.copy_(number)
        give()
        step(optimizer, give)


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> Any:
    """Returns an optimizer of small parameters, without state, hooks or a wrapped step.

    Args:
        optimizer: of the script.
        memo: small parameters by the id of a parameter; other objects that have a copy.
    """
    made: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    memo[id(optimizer.state)] = collections.defaultdict(dict)
    state = vars(optimizer)
    for each in state.values():
        if isinstance(each, nn.Module):
            memo[id(each)] = each
        elif isinstance(each, torch.optim.Optimizer) and id(each) not in memo:
            _copied(each, memo)
    for name, each in state.items():
        if name in _HOOKS:
            made.__dict__[name] = collections.OrderedDict()
        elif name != "step":  # as learning rate schedules wrap it
            made.__dict__[name] = copy.deepcopy(each, memo)
    return made
