"""How much an optimizer keeps for a parameter: found by an update of tensors without memory."""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.optimizer.checks import has_masters
from smdistributed.modelparallel.torch.precision.casting import half_type
from smdistributed.modelparallel.torch.precision.one_pass_adam import SMALLEST, OnePassAdam
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

logger = logging.getLogger(__name__)

#: What is taken where an optimizer cannot be tried: two moments in single precision.
_USUAL_BYTES = 8
_SINGLE_BYTES = 4
#: Of a master that keeps what its parameter in bf16 lacks: see ``precision.split_master``.
_REST_BYTES = 2
#: Options by which an optimizer takes another implementation, which keeps the same.
_ALIKE = {"foreach", "fused", "capturable"}


def kept_bytes(
    runtime: TorchRuntime, tries: Callable[[torch.optim.Optimizer], bool] = lambda _: True
) -> tuple[dict[int, float], list[str], list[str]]:
    """Returns what the optimizers of this process keep, masters included.

    Args:
        runtime: the state of the library in this process.
        tries: tells of which optimizers an update is tried.

    Returns:
        bytes by the identity of a parameter; the names of the optimizers' classes; and remarks
        about those whose update could not be tried.
    """
    found: dict[int, float] = {}
    names, remarks = [], []
    for each in runtime.live_optimizers():
        optimizer = each.optimizer
        names.append(type(optimizer).__name__)
        half = half_type(runtime.config) if has_masters(runtime) else None
        if not tries(optimizer):
            found.update(_usual(optimizer))
            continue
        try:
            splits = half is torch.bfloat16 and OnePassAdam.takes(optimizer, runtime.device)
            found.update(_kept(optimizer, half, _REST_BYTES if splits else _SINGLE_BYTES))
        except Exception as error:
            logger.debug("%r is not tried", optimizer, exc_info=True)
            remarks.append(
                f"{type(optimizer).__name__} cannot be tried on tensors without memory "
                f"({type(error).__name__}: {error}): {_USUAL_BYTES} bytes a number are taken"
            )
            found.update(_usual(optimizer))
    return found, names, remarks


def _usual(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    return {id(one): float(_USUAL_BYTES * one.numel()) for one in _trained(optimizer)}


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if each.requires_grad)


def _kept(
    optimizer: torch.optim.Optimizer, half: torch.dtype | None, large_master_bytes: int
) -> dict[int, float]:
    """Returns the bytes of an optimizer's state after one update, by parameter.

    Args:
        optimizer: it stays as it is.
        half: the type of parameters that have masters in single precision.
        large_master_bytes: of a number of a large master.
    """
    trial = copy.copy(optimizer)
    trial.state = collections.defaultdict(dict)
    trial.param_groups = []
    #: Of each group: what stands for all parameters of one form, and these.
    alike: list[tuple[nn.Parameter, list[torch.Tensor]]] = []
    for group in optimizer.param_groups:
        forms: dict[Any, list[torch.Tensor]] = {}
        for each in group["params"]:
            form = tuple(each.shape), each.dtype, each.requires_grad
            forms.setdefault(form, []).append(each)
        stand_ins = [_stand_in(parameters[0], half) for parameters in forms.values()]
        alike += zip(stand_ins, forms.values(), strict=True)
        # The plainest of them runs without memory.
        plain: dict[str, Any] = {
            name: False for name in ("foreach", "fused", "capturable") if name in group
        }
        trial.param_groups.append({**group, **plain, "params": stand_ins})
    # A scheduler has put another function in the place of the method, which knows the original.
    update: Any = getattr(type(trial).step, "__wrapped__", type(trial).step)
    update(trial)
    found: dict[int, float] = {}
    for stand_in, parameters in alike:
        if stand_in.requires_grad:
            kept = sum(
                each.numel() * each.element_size()
                for each in tensors_in(trial.state.get(stand_in, {}))
            )
            if stand_in.dtype is not parameters[0].dtype:  # it stands for a master
                is_large = stand_in.numel() >= SMALLEST
                kept += stand_in.numel() * (large_master_bytes if is_large else _SINGLE_BYTES)
            found.update((id(each), float(kept)) for each in parameters)
    return found


def _stand_in(parameter: torch.Tensor, half: torch.dtype | None) -> nn.Parameter:
    """Returns what is updated for a parameter, or its master, without memory."""
    has_master = half is not None and parameter.dtype is half
    dtype = torch.float32 if has_master else parameter.dtype
    found = nn.Parameter(
        torch.empty(parameter.shape, dtype=dtype, device="meta"), parameter.requires_grad
    )
    if parameter.requires_grad:
        found.grad = torch.empty_like(found)
    return found
