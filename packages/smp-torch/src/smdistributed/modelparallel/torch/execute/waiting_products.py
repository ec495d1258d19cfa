"""Products with a weight, whose gradients can wait."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.between import atomic
from smdistributed.modelparallel.torch.compat.private.backward import applied_alone
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


@atomic
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Stands for ``torch.nn.functional.linear``."""
    if not may_wait(input, weight, bias, dim=2):
        return plain_linear(input, weight, bias)
    return _multiply(input, weight, bias, is_linear=True)


@atomic
def addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> Any:
    """Stands for ``torch.addmm``; options that change the sum do not wait."""
    if options or not may_wait(mat1, mat2, input, dim=2) or mat1.dim() != 2:
        return plain_addmm(input, mat1, mat2, **options)
    return _multiply(mat1, mat2, input, is_linear=False)


def _multiply(rows: Any, weight: Any, bias: Any, *, is_linear: bool) -> Any:
    dtype = type_of_autocast(rows)
    if dtype is not None:
        rows = rows.to(dtype)
    return _apply(rows, weight, bias, dtype, is_linear)


def _compute(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_linear: bool
) -> torch.Tensor:
    if is_linear:
        # A view, which of more than two dimensions it is, could not be changed in place.
        return plain_linear(rows, weight, bias).data
    assert bias is not None
    return plain_addmm(bias, rows, weight)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dim() == 2 else rows.flatten(0, -2)


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
            rows: shape (..., inputs).
            weight: shape (outputs, inputs) of ``linear``, (inputs, outputs) of ``addmm``.
            bias: shape (outputs,), or None.
            dtype: what autocast computes in; None: as the tensors are.
            is_linear: which of the two.
        """
        # The weight itself, not what it is cast to: gradients of gradients need it. What comes
        # back of it may be a copy, if somebody saves tensors elsewhere.
        ctx.save_for_backward(rows, weight)
        # Its memory of now, as the layer's own view of it has: it may be given another.
        ctx.given = weight.detach(), weight, bias, dtype, is_linear
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
        kept, leaf, bias, dtype, is_linear = ctx.given
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        gradient, shape = _flat(gradients[0]), rows.shape
        rows = _flat(rows)
        factors = (gradient.t(), rows) if is_linear else (rows.t(), gradient)
        result: torch.Tensor | None = None
        if of_rows:
            used = weight if torch.is_grad_enabled() else kept
            used = used if dtype is None else used.to(dtype)
            result = gradient.mm(used if is_linear else used.t()).view(shape)
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


#: ``may_wait`` lets nothing through that transforms of torch.func see.
_apply = applied_alone(_Product)


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
