"""Calls that only modules which stay whole can make: between partitions they would do nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.data import SETTING_DATA

_HOOKS = "hooks of tensors would see the stand-ins of a recording, not the gradients"
_FIX = "Do it inside one module, or put the modules that it concerns on one partition."

_NO_MEMORY = "a stand-in of a recording has no values in memory"
_EARLY = "gradients are computed when its Python has run"
_LATER = (
    "Clip, scale or read gradients after the call of the step function: by smp.clip_grad_norm_, or "
    "by the norm over model.parameters(), made a number by float() once, on every rank."
)
_TENSOR: Any = torch.Tensor

#: Function -> why it does not work between partitions.
_REFUSED: Mapping[Callable[..., Any], str] = {
    _TENSOR.register_hook: _HOOKS,
    _TENSOR.register_post_accumulate_grad_hook: _HOOKS,
    _TENSOR.retain_grad: "gradients of activations are not kept",
    SETTING_DATA: (
        "an assignment to .data is recorded where it gives a parameter or a buffer other numbers, "
        "of its shape and type, in memory of their own (x.clone())"
    ),
    _TENSOR.grad.__get__: _EARLY,
    _TENSOR.grad.__set__: _EARLY,
    _TENSOR.data_ptr: _NO_MEMORY,
    _TENSOR.untyped_storage: _NO_MEMORY,
    _TENSOR.__reduce_ex__: _NO_MEMORY,
}


class NowhereError(UnsupportedError):
    """A module that stays whole does what none may do, run on stand-ins or on tensors."""


def refusal(function: Any, where: str) -> str:
    """Returns why a call cannot be made outside the modules that stay whole; "" if it can.

    Args:
        function: the torch function.
        where: who calls, for the message.
    """
    reason = _REFUSED.get(function, "")
    if not reason:
        return ""
    fix = _LATER if reason == _EARLY else _FIX
    name = torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))
    return f"{name} was called in {where} while a pipelined step runs: {reason}. {fix}"


def exchanges_stand_ins(name: str, where: str) -> UnsupportedError:
    """Returns the error of a function of ``torch.distributed`` between the modules that stay whole.

    Args:
        name: of the function.
        where: who calls, for the message.
    """
    return UnsupportedError(
        f"torch.distributed.{name} was called in {where} while a pipelined step runs: it would "
        "exchange the stand-ins of a recording, which have no values. Return the tensor from the "
        "step function and exchange it after the call, or do it inside one module that stays whole."
    )


def hooks_stand_ins(where: str) -> UnsupportedError:
    """Returns the error of a hook on a node of autograd between the modules that stay whole.

    Args:
        where: who puts it there, for the message.
    """
    return UnsupportedError(
        f"a node of autograd was given a hook in {where} while a pipelined step runs: it is of a "
        "recording, and no backward pass comes to it. Put hooks on parameters before or between "
        "calls of step functions, or do it inside one module that stays whole."
    )


def switched_how(module: nn.Module, name: str, how: str) -> UnsupportedError:
    """Returns the error for a parameter that is switched where ranks cannot follow.

    Args:
        module, name: where the parameter is.
        how: it is used, or left.
    """
    return UnsupportedError(
        f"requires_grad of {type(module).__name__}.{name} is changed while a pipelined step runs, "
        f"{how}. Set it to False around calls of modules, and back before the step function ends, "
        "or change it between two calls of step functions."
    )
