"""The layers the gradients of whose weights can wait.

They are known by their classes, and functions of torch by themselves where the program of a segment
calls them. ``torch.nn.functional.linear`` and the like are not replaced, for user code compares
functions with them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.layers import convolves_as_torch
from smdistributed.modelparallel.torch.execute.waiting_convolutions import PLAIN, convolution
from smdistributed.modelparallel.torch.execute.waiting_products import (
    addmm,
    linear,
    plain_addmm,
    plain_linear,
)
from smdistributed.modelparallel.torch.execute.weight_gradients import functions_that_wait

_CONVOLUTIONS: dict[Any, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
#: By identity: what a segment calls may be anything.
_FUNCTIONS: dict[int, Callable[..., Any]] = {
    id(plain_linear): linear,
    id(plain_addmm): addmm,
    **{id(plain): functools.partial(convolution, num_dims) for num_dims, plain in PLAIN.items()},
}


def that_can_wait(function: Any) -> Any:
    """Returns what stands for a function, which the program of a segment calls itself."""
    return _FUNCTIONS.get(id(function), function)


@contextlib.contextmanager
def putting_off() -> Iterator[None]:
    """Inside, layers compute so that a backward pass can put the gradients of weights off."""
    computing = {
        kind: (kind.forward, _computing(kind)) for kind in _classes() if _has_own_forward(kind)
    }
    with functions_that_wait():
        for kind, (forward, compute) in computing.items():
            kind.forward = _waiting_forward(forward, compute)
        try:
            yield
        finally:
            for kind, (forward, _) in computing.items():
                kind.forward = forward


def _classes() -> list[Any]:
    """Returns the layers that multiply with a weight, their own or that of Transformers."""
    module = sys.modules.get("transformers.pytorch_utils")
    return [nn.Linear, *_CONVOLUTIONS, *([module.Conv1D] if module is not None else [])]


def _has_own_forward(kind: Any) -> bool:
    """Whether a class computes as it is written, and no script has replaced its forward."""
    code = getattr(kind.forward, "__code__", None)
    return code is not None and code.co_filename == sys.modules[kind.__module__].__file__


def _computing(kind: Any) -> Callable[[Any, Any], Any]:
    """Returns what computes what a layer of a class does, or answers NotImplemented."""
    if kind is nn.Linear:
        return _linear
    return _convolution if kind in _CONVOLUTIONS else _addmm


# Each asks for the weight once, as the layer does: it may be computed whenever it is asked for.


def _linear(layer: Any, input: Any) -> Any:
    return linear(input, layer.weight, layer.bias)


def _addmm(layer: Any, input: Any) -> Any:
    flat = addmm(layer.bias, input.view(-1, input.size(-1)), layer.weight)
    return flat.view(*input.shape[:-1], layer.nf)


def _convolution(layer: Any, input: Any) -> Any:
    if not convolves_as_torch(layer) or layer.padding_mode != "zeros":
        return NotImplemented
    return convolution(
        len(layer.kernel_size),
        input,
        layer.weight,
        layer.bias,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
    )


def _waiting_forward(
    forward: Callable[..., Any], compute: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def waiting_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The gradients of compiled code wait by its backward pass (compiled_backward).
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return forward(self, *args, **kwargs)
        result = compute(self, args[0])
        return forward(self, *args) if result is NotImplemented else result

    return waiting_forward
