"""Gradients of weights, put off: the second half of a backward pass.

A rank waits for the gradients of what it sent on, and nobody waits for the gradients of weights.
Where the schedule makes two passes of a backward pass, the first computes all gradients but those
of the weights that linear layers multiply with: for these it keeps what they are computed from, and
the second pass computes them.

Inside ``putting_off`` these layers compute by a function of autograd whose backward knows whether
it may wait. It may in the backward pass that the executor runs, and in no other: gradients that
user code asks for come at once. A weight waits only if all that becomes of its gradient is that it
is added up; one that has hooks, or was computed from something, gets its gradient in the first
pass. The layers are known by their classes: ``torch.nn.functional.linear`` itself is what user code
compares functions with.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import (
    backward_pass_id,
    hooks_after_accumulation,
    hooks_on_gradient,
)
from smdistributed.modelparallel.torch.compat.private.modes import is_watched
from smdistributed.modelparallel.torch.compat.private.tensors import version_of

_linear = torch.nn.functional.linear
_addmm = torch.addmm


class WaitingGradients:
    """The gradients of weights that one backward pass has put off.

    Args:
        roots: what the pass starts from.
    """

    def __init__(self, roots: Sequence[torch.Tensor | GradientEdge]) -> None:
        self._pass_id: int | None = None
        self._waiting: list[_Waiting] = []
        for root in roots:
            node = root.grad_fn if isinstance(root, torch.Tensor) else root.node
            if node is not None:
                node.register_prehook(self._begin)

    def _begin(self, gradients: Any) -> None:
        # User code may start backward passes of its own within this one.
        self._pass_id = backward_pass_id()

    @property
    def is_this_pass(self) -> bool:
        """Whether autograd runs the pass from the roots now, and no other."""
        return self._pass_id == backward_pass_id()

    def put_off(self, waiting: _Waiting) -> None:
        """Keeps what gradients are computed from."""
        self._waiting.append(waiting)

    def compute(self) -> None:
        """Adds the gradients to those of the weights.

        Raises:
            UnsupportedError: what one is computed from was changed in place since.
        """
        # Each frees what it kept before the next is computed.
        self._waiting.reverse()
        while self._waiting:
            self._waiting.pop().compute()


@dataclass
class _Waiting:
    """The product of one layer, of which the weight's gradient is wanted.

    Attributes:
        weight, bias: leaves of autograd; None if its gradient is not wanted.
        factors: the two matrices whose product is the weight's gradient.
        gradient: of the product; shape (rows, features).
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    factors: tuple[torch.Tensor, torch.Tensor]
    gradient: torch.Tensor
    _versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [version_of(each) for each in (*self.factors, self.gradient)]

    def compute(self) -> None:
        """Adds to the gradients of weight and bias."""
        if self._versions_now() != self._versions:
            shape = tuple(() if self.weight is None else self.weight.shape)
            raise UnsupportedError(
                f"The input of a linear layer whose weight has shape {shape}, or the gradient of "
                "its output, was changed in place while the weight's gradient waited for an idle "
                "moment of this rank. Leave both as they are until the step is over (a hook "
                "returns a new gradient, a module keeps a copy), or choose the pipeline "
                '"interleaved" or "simple", where no gradient waits.'
            )
        if self.weight is not None:
            _add_product(self.weight, *self.factors)
        if self.bias is not None:
            _add(self.bias, self.gradient.sum(0))


@torch.no_grad()
def _add_product(weight: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    known = weight.grad
    if (
        type(known) is torch.Tensor
        and (known.layout, known.dtype) == (torch.strided, one.dtype)
        and known.stride() == weight.stride()
    ):
        known.addmm_(one, other)
        _note(weight)
    else:
        _add(weight, _product(weight, one, other))


def _product(weight: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns a gradient that lies in memory as the weight does."""
    if weight.stride(0) < weight.stride(1):
        return other.t().mm(one.t()).t()
    return one.mm(other)


@torch.no_grad()
def _add(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds to the gradient of a leaf what autograd would add."""
    gradient = gradient.to(leaf.dtype)
    if leaf.grad is None and gradient.stride() == leaf.stride():
        leaf.grad = gradient
        _note(leaf)
    else:
        torch.autograd.backward([leaf], [gradient])


def _note(leaf: torch.Tensor) -> None:
    for hook in hooks_after_accumulation(leaf):
        hook(leaf)


# What runs in the backward pass

#: Where the pass that runs now puts gradients off; autograd may run it in another thread.
_here: WaitingGradients | None = None
_is_putting_off = False


@contextlib.contextmanager
def put_off_in(waiting: WaitingGradients) -> Iterator[None]:
    """Lets the backward pass that runs inside put gradients off."""
    global _here
    _here = waiting
    try:
        yield
    finally:
        _here = None


def _compute(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_linear: bool
) -> torch.Tensor:
    if is_linear:
        return _linear(rows, weight, bias)
    assert bias is not None
    return _addmm(bias, rows, weight)


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
        here = _here
        if here is not None and here.is_this_pass and _adds_up(leaf) and _adds_up(bias):
            here.put_off(
                _Waiting(leaf if of_weight else None, bias if of_bias else None, factors, gradient)
            )
            return result, None, None, None, None
        return (
            result,
            _product(weight, *factors).to(weight.dtype) if of_weight else None,
            gradient.sum(0).to(bias.dtype) if of_bias else None,
            None,
            None,
        )


# What runs in the forward pass


@contextlib.contextmanager
def putting_off() -> Iterator[None]:
    """Inside, layers compute so that a backward pass can put the gradients of weights off."""
    global _is_putting_off
    _is_putting_off = True
    classes = {kind: kind.forward for kind in _classes()}
    for kind, forward in classes.items():
        kind.forward = _waiting_forward(forward, is_linear=kind is nn.Linear)
    try:
        yield
    finally:
        _is_putting_off = False
        for kind, forward in classes.items():
            kind.forward = forward


def is_putting_off() -> bool:
    """Whether layers compute so now."""
    return _is_putting_off


def _classes() -> list[Any]:
    """Returns the layers that multiply with a weight, their own or that of Transformers."""
    module = sys.modules.get("transformers.pytorch_utils")
    return [nn.Linear, *([module.Conv1D] if module is not None else [])]


def _waiting_forward(forward: Callable[..., Any], *, is_linear: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Compiled code is cut where its graph has products (compiled_pieces).
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return forward(self, *args, **kwargs)
        (rows,) = args
        # Once, as the layer does: a weight may be computed whenever it is asked for.
        if is_linear:
            return linear(rows, self.weight, self.bias)
        flat = addmm(self.bias, rows.view(-1, rows.size(-1)), self.weight)
        return flat.view(*rows.shape[:-1], self.nf)

    return compute


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Stands for ``torch.nn.functional.linear``."""
    if not _may_wait(input, weight, bias):
        return _linear(input, weight, bias)
    return _multiply(input, weight, bias, is_linear=True)


def addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> Any:
    """Stands for ``torch.addmm``; options that change the sum do not wait."""
    if options or not _may_wait(mat1, mat2, input) or mat1.dim() != 2:
        return _addmm(input, mat1, mat2, **options)
    return _multiply(mat1, mat2, input, is_linear=False)


def that_can_wait(function: Any) -> Any:
    """Returns what stands for a function, which the program of a segment calls itself."""
    return {id(_linear): linear, id(_addmm): addmm}.get(id(function), function)


def _multiply(rows: Any, weight: Any, bias: Any, *, is_linear: bool) -> Any:
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if dtype is not None:
        rows = rows.to(dtype)
    # Outside the function: views that one makes cannot be changed in place.
    out: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        rows.flatten(0, -2), weight, bias, dtype, is_linear
    )
    return out.view(*rows.shape[:-1], out.shape[-1])


def _may_wait(rows: Any, weight: Any, bias: Any) -> bool:
    """Whether these are plain tensors whose product autograd alone sees."""
    if not (_is_putting_off and torch.is_grad_enabled()) or is_watched():
        return False
    if not (_is_plain(weight) and weight.requires_grad and weight.is_leaf and weight.dim() == 2):
        return False
    if not (_is_plain(rows) and rows.dim() >= 2 and rows.device == weight.device):
        return False
    if not rows.requires_grad:
        # The weight's gradient is all that the pass computes; and modules write to their buffers.
        return False
    if bias is not None and not (_is_plain(bias) and bias.is_leaf and bias.dim() == 1):
        return False
    if torch.is_autocast_enabled(rows.device.type):
        return torch.float64 not in (rows.dtype, weight.dtype)
    return bool(rows.dtype is weight.dtype)


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
    )


def _adds_up(leaf: torch.Tensor | None) -> bool:
    """Whether nobody looks at the gradient of a leaf before it is whole, but for counting."""
    return leaf is None or (
        not hooks_on_gradient(leaf)
        and all(getattr(hook, "only_counts", False) for hook in hooks_after_accumulation(leaf))
    )
