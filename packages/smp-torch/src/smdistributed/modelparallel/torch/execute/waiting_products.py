"""Products with a weight, whose gradients can wait."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.execute.weight_gradients import (
    Waiting,
    add,
    may_wait,
    note_added,
    sum_of,
    type_of_autocast,
    waiting_for,
)

#: The functions themselves: user code compares functions with them, so they are not replaced.
plain_linear = torch.nn.functional.linear
plain_addmm = torch.addmm


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Stands for ``torch.nn.functional.linear``."""
    if not may_wait(input, weight, bias, dim=2):
        return plain_linear(input, weight, bias)
    return _multiply(input, weight, bias, is_linear=True)


def addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> Any:
    """Stands for ``torch.addmm``; options that change the sum do not wait."""
    if options or not may_wait(mat1, mat2, input, dim=2) or mat1.dim() != 2:
        return plain_addmm(input, mat1, mat2, **options)
    return _multiply(mat1, mat2, input, is_linear=False)


def _multiply(rows: Any, weight: Any, bias: Any, *, is_linear: bool) -> Any:
    dtype = type_of_autocast(rows)
    if dtype is not None:
        rows = rows.to(dtype)
    # Outside the function: views that one makes cannot be changed in place.
    flat = rows if rows.dim() == 2 else rows.flatten(0, -2)
    out: torch.Tensor = _Product.apply(flat, weight, bias, dtype, is_linear)  # type: ignore[no-untyped-call]
    return out if flat is rows else out.view(rows.shape[:-1] + out.shape[1:])


def _compute(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_linear: bool
) -> torch.Tensor:
    if is_linear:
        return plain_linear(rows, weight, bias)
    assert bias is not None
    return plain_addmm(bias, rows, weight)


class _Product(torch.autograd.Function):
    """Rows times a weight, plus a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None,
        is_linear: bool,
    ) -> torch.Tensor:
        """Computes it.

        Args:
            ctx: of autograd.
            rows: shape (rows, inputs).
            weight: shape (outputs, inputs) of ``linear``, (inputs, outputs) of ``addmm``.
            bias: shape (outputs,), or None.
            dtype: what autocast computes in; None: as the tensors are.
            is_linear: which of the two.
        """
        # The weight itself, not what it is cast to: gradients of gradients need it. What comes
        # back of it may be a copy, if somebody saves tensors elsewhere.
        ctx.save_for_backward(rows, weight)
        # Its memory of now, as the layer's own view of it has: it may be given another.
        ctx.weight = weight.detach()
        ctx.leaves = weight, bias
        ctx.dtype, ctx.is_linear = dtype, is_linear
        if dtype is None:
            return _compute(rows, weight, bias, is_linear)
        with torch.autocast(rows.device.type, enabled=False):
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            return _compute(rows, weight, bias, is_linear)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Computes the gradients, and puts off what may wait."""
        rows, weight = ctx.saved_tensors
        leaf, bias = ctx.leaves
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        (gradient,) = gradients
        factors = (gradient.t(), rows) if ctx.is_linear else (rows.t(), gradient)
        result: torch.Tensor | None = None
        if of_rows:
            used = weight if torch.is_grad_enabled() else ctx.weight
            used = used if ctx.dtype is None else used.to(ctx.dtype)
            result = gradient.mm(used if ctx.is_linear else used.t())
        here = waiting_for(leaf, bias)
        if here is not None:
            here.put_off(
                _WaitingProduct(
                    leaf if of_weight else None, bias if of_bias else None, *factors, gradient
                )
            )
            return result, None, None, None, None
        return (
            result,
            _product(weight, *factors).to(weight.dtype) if of_weight else None,
            gradient.sum(0).to(bias.dtype) if of_bias else None,
            None,
            None,
        )


class _WaitingProduct(Waiting):
    """Keeps the two matrices whose product is the weight's gradient, and that of the result.

    The latter has the shape (rows, features).
    """

    def add(self, *kept: torch.Tensor) -> None:
        """Adds the product, and the sum of the rows.

        Args:
            kept: the factors, and the gradient of the result.
        """
        one, other, gradient = kept
        if self.weight is not None:
            add_product(self.weight, one, other)
        if self.bias is not None:
            add(self.bias, gradient.sum(0))


def add_product(weight: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """Adds the product of two matrices to the gradient of a leaf."""
    known = sum_of(weight, one.dtype)
    if known is not None:
        known.addmm_(one, other)
        note_added(weight)
    else:
        add(weight, _product(weight, one, other))


def _product(weight: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns a gradient that lies in memory as the weight does."""
    if weight.stride(0) < weight.stride(1):
        return other.t().mm(one.t()).t()
    return one.mm(other)
