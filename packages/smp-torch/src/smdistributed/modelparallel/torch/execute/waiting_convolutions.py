"""Convolutions, the gradients of whose weights can wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.between import atomic
from smdistributed.modelparallel.torch.execute.weight_gradients import (
    Waiting,
    add,
    may_wait,
    type_of_autocast,
    waiting_for,
)

#: By how many dimensions are convolved.
PLAIN: dict[int, Callable[..., torch.Tensor]] = {
    1: torch.conv1d,
    2: torch.conv2d,
    3: torch.conv3d,
}


class _Options(NamedTuple):
    """How a convolution goes over its input; a number for each of the dimensions."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@atomic
def convolution(
    num_dims: int,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Stands for ``torch.conv1d`` and its kind.

    Args:
        num_dims: how many dimensions are convolved.
        input: a batch; one example does not wait.
        weight: as of ``torch.conv1d``; so are the others.
        bias: or None.
        stride: a number, or one for each dimension.
        padding: the same; in words it does not wait.
        dilation: as the stride.
        groups: of channels.
    """
    plain = PLAIN[num_dims]
    if isinstance(padding, str) or not may_wait(input, weight, bias, dim=num_dims + 2):
        return plain(input, weight, bias, stride, padding, dilation, groups)
    options = _Options(
        _for_each(stride, num_dims),
        _for_each(padding, num_dims),
        _for_each(dilation, num_dims),
        groups,
    )
    dtype = type_of_autocast(input)
    if dtype is not None:
        input = input.to(dtype)
    return _Convolution.apply(input, weight, bias, dtype, plain, options)  # type: ignore[no-untyped-call]


def _for_each(given: Any, num_dims: int) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int) else tuple(given)
    return numbers * num_dims if len(numbers) == 1 else numbers


class _Convolution(torch.autograd.Function):
    """A convolution with a weight, plus a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None,
        plain: Callable[..., torch.Tensor],
        options: _Options,
    ) -> torch.Tensor:
        """Computes it.

        Args:
            ctx: of autograd.
            input: shape (batch, channels, ...).
            weight: shape (outputs, channels / groups, ...).
            bias: shape (outputs,), or None.
            dtype: what autocast computes in; None: as the tensors are.
            plain: torch's function.
            options: for it.
        """
        # As for products: the weight itself, and its memory of now.
        ctx.save_for_backward(input, weight)
        ctx.weight = weight.detach()
        ctx.leaves = weight, bias
        ctx.dtype, ctx.options = dtype, options
        if dtype is None:
            return plain(input, weight, bias, *options)
        with torch.autocast(input.device.type, enabled=False):
            bias = None if bias is None else bias.to(dtype)
            return plain(input, weight.to(dtype), bias, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Computes the gradients, and puts off what may wait."""
        input, weight = ctx.saved_tensors
        leaf, bias = ctx.leaves
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        (gradient,) = gradients
        used = weight if torch.is_grad_enabled() else ctx.weight
        used = used if ctx.dtype is None else used.to(ctx.dtype)
        here = waiting_for(leaf, bias) if of_weight else None
        if here is not None:
            here.put_off(
                _WaitingConvolution(leaf, bias if of_bias else None, gradient, input, ctx.options)
            )
            of_weight = of_bias = False
        found = _differentiate(gradient, input, used, ctx.options, (of_input, of_weight, of_bias))
        kinds = (input.dtype, weight.dtype, None if bias is None else bias.dtype)
        cast = [
            None if each is None else each.to(kind) for each, kind in zip(found, kinds, strict=True)
        ]
        return *cast, None, None, None


def _differentiate(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    options: _Options,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of input, weight and bias that are wanted, and None for the others."""
    if not any(wanted):
        return None, None, None
    found: tuple[torch.Tensor | None, ...] = torch.ops.aten.convolution_backward(
        gradient,
        input,
        weight,
        [weight.shape[0]] if wanted[2] else None,
        options.stride,
        options.padding,
        options.dilation,
        False,
        [0] * len(options.stride),
        options.groups,
        wanted,
    )
    return found


class _WaitingConvolution(Waiting):
    """Keeps the gradient of the result, and the input.

    Args:
        weight: of the convolution.
        bias: of it; None if its gradient is not wanted.
        gradient: of the result.
        input: of the convolution.
        options: of it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient: torch.Tensor,
        input: torch.Tensor,
        options: _Options,
    ) -> None:
        super().__init__(weight, bias, gradient, input)
        self._options = options

    def add(self, *kept: torch.Tensor) -> None:
        """Computes the gradients, and adds them.

        Args:
            kept: the gradient of the result, and the input.
        """
        gradient, input = kept
        assert self.weight is not None
        # Of the weight only the shape and the layout count.
        like = torch.empty_like(self.weight, dtype=gradient.dtype)
        wanted = (False, True, self.bias is not None)
        _, of_weight, of_bias = _differentiate(gradient, input, like, self._options, wanted)
        assert of_weight is not None
        add(self.weight, of_weight)
        if self.bias is not None:
            assert of_bias is not None
            add(self.bias, of_bias)
