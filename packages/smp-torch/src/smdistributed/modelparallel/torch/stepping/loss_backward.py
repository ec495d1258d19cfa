"""``loss.backward()`` in a step with one partition gives what ``model.backward(loss)`` gives.

Scripts reach autograd in many ways: by the loss, by ``torch.autograd.backward``, through a scaler
or the wrapper of a trainer. All of them call one function of torch in the end, and a step stands
there. Gradients that are asked for and not added up, as for a penalty, are none of its business,
unless a script puts them into ``.grad`` itself: they are those of one microbatch on one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import is_in_backward
from smdistributed.modelparallel.torch.execute.starts import Scale, scaled
from smdistributed.modelparallel.torch.sharding.parameter import gradient_here
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import slices_as_they_are


class Stepping(Protocol):
    """A step whose body runs as it is."""

    is_differentiating: bool
    set_gradients: SetGradients

    def scale_of_losses(self) -> Scale:
        """Returns what losses count by, whichever model they are of."""

    def differentiate(self, run: Callable[[], Any]) -> Any:
        """Runs a backward pass of the microbatch in progress."""

    def start(self, tensors: Any, starts: Any) -> None:
        """Does what ``torch.autograd.backward`` does, on all ranks that compute together."""


def stand_in(step: Stepping) -> Callable[..., Any]:
    """Returns what differentiates in the body of a step; see ``engine_replaced``."""

    def run(
        engine: Callable[..., Any],
        tensors: Any,
        starts: Any,
        keeps_graph: bool,
        makes_graph: bool,
        inputs: Any,
        *args: Any,
        accumulate_grad: bool,
        **options: Any,
    ) -> Any:
        def differentiate(starts: Any) -> Any:
            return engine(
                tensors,
                starts,
                keeps_graph,
                makes_graph,
                inputs,
                *args,
                accumulate_grad=accumulate_grad,
                **options,
            )

        if step.is_differentiating or is_in_backward():
            return differentiate(starts)
        if not accumulate_grad:
            step.set_gradients.note()
            return differentiate(starts)

        def run_pass(starts: Any) -> Any:
            if keeps_graph or makes_graph or inputs:  # then it is compared as it runs
                return differentiate(starts)
            return step.start(tensors, starts)

        scale = step.scale_of_losses()
        if isinstance(scale, float) and scale == 1.0:
            return step.differentiate(lambda: run_pass(starts))
        if makes_graph:
            raise UnsupportedError(
                "backward(create_graph=True) in a step function of several microbatches leaves "
                "gradients that are sums over some of them: compute what you differentiate again "
                "by torch.autograd.grad(loss, parameters, create_graph=True)."
            )
        own = tuple(None if each is None else scaled(each, scale) for each in starts)
        return step.differentiate(lambda: run_pass(own))

    return run


class SetGradients:
    """Refuses gradients that a script sets by hand in the body of a step.

    Args:
        parameters: gives those of models, with their names.
        is_part: whether a microbatch on this rank has a part of the gradient only.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]], *, is_part: bool
    ) -> None:
        self._parameters = parameters
        self._is_part = is_part
        self._before: list[tuple[str, nn.Parameter, Any]] | None = None

    def note(self) -> None:
        """Hears that the script has gradients in hand."""
        if self._is_part and self._before is None:
            with slices_as_they_are():
                self._before = [(name, each, _now(each)) for name, each in self._parameters()]

    def check(self) -> None:
        """Raises where one is not what it was; then a backward pass may change it.

        Raises:
            UnsupportedError: the script has set it.
        """
        if self._before is None:
            return
        with slices_as_they_are():
            now = [_now(parameter) for _, parameter, _ in self._before]
        for (name, _, before), after in zip(self._before, now, strict=True):
            if after[0] is not before[0] or after[1] != before[1]:
                raise UnsupportedError(
                    f"the gradient of {name} was set in a step function, and what "
                    "torch.autograd.grad gives there is of one microbatch on one replica: give "
                    "the loss to model.backward, which makes the mean over the batch."
                )
        self._before = None


def _now(parameter: nn.Parameter) -> tuple[torch.Tensor | None, int]:
    gradient = gradient_here(parameter)
    return gradient, 0 if gradient is None else gradient._version
