"""How much an optimizer keeps for a parameter: found by an update of tensors without memory."""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.optimizer.checks import has_masters
from smdistributed.modelparallel.torch.precision.casting import half_type
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

logger = logging.getLogger(__name__)

#: What is taken where an optimizer cannot be tried: two moments in single precision.
_USUAL_BYTES = 8
_SINGLE_BYTES = 4
#: Options by which an optimizer takes another implementation, which keeps the same.
_ALIKE = {"foreach", "fused", "capturable"}


def kept_bytes(runtime: TorchRuntime) -> tuple[dict[int, float], list[str], list[str]]:
    """Returns what the optimizers of this process keep, masters included.

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
        try:
            found.update(_kept(optimizer, half))
        except Exception as error:
            logger.debug("%r is not tried", optimizer, exc_info=True)
            remarks.append(
                f"{type(optimizer).__name__} cannot be tried on tensors without memory "
                f"({type(error).__name__}: {error}): {_USUAL_BYTES} bytes a number are taken"
            )
            found.update((id(one), _USUAL_BYTES * one.numel()) for one in _trained(optimizer))
    return found, names, remarks


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if each.requires_grad)


def _kept(optimizer: torch.optim.Optimizer, half: torch.dtype | None) -> dict[int, float]:
    """Returns the bytes of an optimizer's state after one update, by parameter.

    Args:
        optimizer: it stays as it is.
        half: the type of parameters that have masters in single precision.
    """
    trial = copy.copy(optimizer)
    trial.state = collections.defaultdict(dict)
    trial.param_groups = []
    stand_ins: dict[int, nn.Parameter] = {}
    found: dict[int, float] = {}
    for group in optimizer.param_groups:
        params = []
        for each in group["params"]:
            has_master = half is not None and each.dtype is half
            dtype = torch.float32 if has_master else each.dtype
            stand_in = nn.Parameter(torch.empty(each.shape, dtype=dtype, device="meta"))
            if each.requires_grad:
                stand_in.grad = torch.empty_like(stand_in)
                stand_ins[id(each)] = stand_in
                found[id(each)] = float(_SINGLE_BYTES * each.numel() if has_master else 0)
            params.append(stand_in)
        # The plainest of them runs without memory.
        plain: dict[str, Any] = {
            name: False for name in ("foreach", "fused", "capturable") if name in group
        }
        trial.param_groups.append({**group, **plain, "params": params})
    # A scheduler has put another function in the place of the method, which knows the original.
    update: Any = getattr(type(trial).step, "__wrapped__", type(trial).step)
    update(trial)
    for key, stand_in in stand_ins.items():
        state = trial.state.get(stand_in, {})
        found[key] += sum(each.numel() * each.element_size() for each in tensors_in(state))
    return found
