"""Gradients of weights, put off: the second half of a backward pass.

A rank waits for the gradients of what it sent on, and nobody waits for the gradients of weights.
Where the schedule makes two passes of a backward pass, the first computes all gradients but those
of the weights of some layers (``waiting_layers``): for these it keeps what they are computed from,
and the second pass computes them.

The functions of these layers have a backward that knows whether it may wait. It may in the backward
pass that the executor runs, and in no other: gradients that user code asks for come at once. A
weight waits only if all that becomes of its gradient is that it is added up; one that has hooks, or
was computed from something, gets its gradient in the first pass.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import (
    backward_pass_id,
    hooks_after_accumulation,
    hooks_on_gradient,
    put_own_hook,
    saved_tensors_hooks,
)
from smdistributed.modelparallel.torch.compat.private.modes import is_any_autocast, is_watched
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.trial.turns import is_code_of_others, module_of


class WaitingGradients:
    """The gradients of weights that one backward pass has put off.

    Args:
        roots: what the pass starts from.
        entered: leaves that stand for what comes in. Another pass waits for their gradients, though
            a layer may take one for a weight.
    """

    def __init__(
        self, roots: Sequence[torch.Tensor | GradientEdge], entered: Sequence[torch.Tensor] = ()
    ) -> None:
        self._entered = frozenset(map(id, entered))
        self._pass_id: int | None = None
        self._waiting: list[Waiting] = []
        for root in roots:
            node = root.grad_fn if isinstance(root, torch.Tensor) else root.node
            if node is not None:
                put_own_hook(node.register_prehook, self._begin)

    def _begin(self, gradients: Any) -> None:
        # User code may start backward passes of its own within this one.
        self._pass_id = backward_pass_id()

    @property
    def is_this_pass(self) -> bool:
        """Whether autograd runs the pass from the roots now, and no other."""
        return self._pass_id == backward_pass_id()

    def may_wait(self, leaf: torch.Tensor | None) -> bool:
        """Whether nobody needs the gradient of a leaf before it is whole."""
        return id(leaf) not in self._entered and _adds_up(leaf)

    def put_off(self, waiting: Waiting) -> None:
        """Keeps what gradients are computed from."""
        self._waiting.append(waiting)

    @torch.no_grad()
    def compute(self) -> None:
        """Adds the gradients to those of the weights.

        Raises:
            UnsupportedError: what one is computed from was changed in place since.
        """
        # Each frees what it kept before the next is computed.
        self._waiting.reverse()
        while self._waiting:
            self._waiting.pop().compute()


class Waiting(ABC):
    """One layer's call, of which the gradients of the weight and the bias are wanted.

    Args:
        weight: a leaf of autograd; None if its gradient is not wanted.
        bias: the same.
        kept: what the gradients are computed from.
    """

    def __init__(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, *kept: torch.Tensor
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._kept = kept
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [version_of(each) for each in self._kept]

    def compute(self) -> None:
        """Adds to the gradients of weight and bias.

        Raises:
            UnsupportedError: what they are computed from was changed in place since.
        """
        if self._versions_now() != self._versions:
            shape = tuple(() if self.weight is None else self.weight.shape)
            raise UnsupportedError(
                f"The input of a layer whose weight has shape {shape}, or the gradient of "
                "its output, was changed in place while the weight's gradient waited for an idle "
                "moment of this rank. Leave both as they are until the step is over (a hook "
                "returns a new gradient, a module keeps a copy), or choose the pipeline "
                '"interleaved" or "simple", where no gradient waits.'
            )
        self.add(*self._kept)

    @abstractmethod
    def add(self, *kept: torch.Tensor) -> None:
        """Computes the gradients, and adds them; inside ``no_grad``.

        Args:
            kept: what they are computed from.
        """


def add(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds to the gradient of a leaf what autograd would add."""
    gradient = gradient.to(leaf.dtype)
    if leaf.grad is None and gradient.stride() == leaf.stride():
        leaf.grad = gradient
        note_added(leaf)
    elif (known := sum_of(leaf, gradient.dtype)) is not None:
        known.add_(gradient)
        note_added(leaf)
    else:
        torch.autograd.backward([leaf], [gradient])


def sum_of(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the gradient of a leaf if autograd would add another one to it in place."""
    known = leaf.grad
    is_plain = (
        type(known) is torch.Tensor
        and (known.layout, known.dtype) == (torch.strided, dtype)
        and known.stride() == leaf.stride()
    )
    return known if is_plain else None


def note_added(leaf: torch.Tensor) -> None:
    """Tells those who count that a gradient was added to a leaf's."""
    for hook in hooks_after_accumulation(leaf):
        hook(leaf)


# What runs in the backward pass

#: Where the pass that runs now puts gradients off; autograd may run it in another thread.
_here: WaitingGradients | None = None


@contextlib.contextmanager
def put_off_in(waiting: WaitingGradients) -> Iterator[None]:
    """Lets the backward pass that runs inside put gradients off."""
    global _here
    _here = waiting
    try:
        yield
    finally:
        _here = None


def waiting_for(*leaves: torch.Tensor | None) -> WaitingGradients | None:
    """Returns where gradients of these leaves are put off now; None if they come at once."""
    here = _here
    waits = here is not None and here.is_this_pass and all(map(here.may_wait, leaves))
    return here if waits else None


def _adds_up(leaf: torch.Tensor | None) -> bool:
    """Whether nobody looks at the gradient of a leaf before it is whole, but for counting."""
    return leaf is None or (
        not hooks_on_gradient(leaf)
        and all(getattr(hook, "only_counts", False) for hook in hooks_after_accumulation(leaf))
    )


# What runs in the forward pass

_is_putting_off = False


@contextlib.contextmanager
def functions_that_wait() -> Iterator[None]:
    """Inside, functions of layers compute so that gradients of weights can be put off."""
    global _is_putting_off
    _is_putting_off = True
    try:
        yield
    finally:
        _is_putting_off = False


def may_wait(input: Any, weight: Any, bias: Any, *, dim: int) -> bool:
    """Whether these are plain tensors whose product autograd alone sees.

    Args:
        input: of the layer.
        weight: its weight.
        bias: its bias, or None.
        dim: how many dimensions the weight has.
    """
    # Every layer of every microbatch asks: first what is asked soonest and says no most often.
    if not (_is_putting_off and torch.is_grad_enabled()) or is_watched():
        return False
    if type(input) not in _PLAIN or not input.requires_grad:
        # The weight's gradient is all that the pass computes; and modules write to their buffers.
        return False
    if input.layout is not torch.strided or input.dim() < dim:
        return False
    if not (_is_leaf(weight, dim) and weight.requires_grad and input.device == weight.device):
        return False
    if bias is not None and not _is_leaf(bias, 1):
        return False
    if not (_adds_up(weight) and _adds_up(bias)):
        return False  # hooks of both see in which order their gradients come
    hooks = saved_tensors_hooks()
    if hooks is not None and any(map(is_code_of_others, map(module_of, hooks))):
        return False  # what they save may have other numbers
    if is_any_autocast() and torch.is_autocast_enabled(input.device.type):
        return torch.float64 not in (input.dtype, weight.dtype) and input.is_floating_point()
    return bool(input.dtype is weight.dtype)


_PLAIN = frozenset({torch.Tensor, nn.Parameter})


def _is_leaf(tensor: Any, dim: int) -> bool:
    """Whether something is a plain tensor of real numbers with so many dimensions, and a leaf."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_leaf
        and tensor.dim() == dim
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
    )


def type_of_autocast(input: torch.Tensor) -> torch.dtype | None:
    """Returns what a layer computes in under autocast; None without."""
    if not is_any_autocast():
        return None
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
