"""The user's hooks on the gradients of a model's parameters, by whatever road they came there."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.backward import (
    Several,
    hook_of_several,
    hooks_after_accumulation,
    hooks_of_accumulation,
    hooks_on_gradient,
    is_accumulation_kept,
    number_of_hooks_ever,
)
from smdistributed.modelparallel.torch.compat.private.below import past_operations
from smdistributed.modelparallel.torch.compat.private.modes import past_function_modes
from smdistributed.modelparallel.torch.trial.turns import is_code_of_others, module_of


class Moment(enum.Enum):
    """When a hook runs, and so what it is given."""

    GRADIENT = "the gradient"
    BEFORE = "the gradient, in a tuple, by the node that adds it up"
    AFTER = "the parameter, whose gradient has been added up"
    BEHIND = "nothing, and the gradient in a tuple, by the node that has added it up"


#: As they are listed.
_OF_NODES = (Moment.BEFORE, Moment.BEHIND)


@dataclass(frozen=True, eq=False)
class GradientHook:
    """A hook of the user's.

    Attributes:
        parameter: whose gradient it is on.
        name: of the parameter.
        moment: when it runs.
        function: the user's.
        several: what it belongs to, if the function gets the gradients of several tensors.
    """

    parameter: torch.Tensor
    name: str
    moment: Moment
    function: Callable[..., Any]
    several: Several | None = None

    @property
    def key(self) -> tuple[int, Moment, int, int]:
        """What is the same for the same function at the same place, as long as it is kept."""
        several = 0 if self.several is None else id(self.several.key)
        return id(self.parameter), self.moment, id(self.function), several


class GradientHooks:
    """The hooks on one model's parameters.

    Attributes:
        found: when they were looked for last, in the order of the parameters.
    """

    def __init__(self) -> None:
        self.found: list[GradientHook] = []
        #: Those that modules put on their own parameters in a step.
        self._of_modules: list[GradientHook] = []
        self._number = -1

    def follow(self, parameters: Callable[[], Mapping[str, torch.Tensor]]) -> bool:
        """Looks for hooks before a step, if any were registered since.

        Args:
            parameters: returns those of the model by name, wherever they are.

        Returns:
            whether there are others than before.
        """
        if self._number == number_of_hooks_ever():
            return False
        former = self.found
        self.look(parameters())
        return [each.key for each in self.found] != [each.key for each in former]

    def look(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Looks for hooks; to be called between runs on fakes."""
        with past_function_modes(), past_operations():
            every = [hook for each in parameters.items() for hook in _hooks_of(*each)]
        self._of_modules = _among(self._of_modules, every)
        self.found = _among(every, self._of_modules, are_in=False)
        self._number = number_of_hooks_ever()

    def leave_out(self, parameters: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Leaves out what was registered in a step: by modules, on the rank that has them."""
        former = self.found
        if self.follow(parameters):
            self._of_modules += _among(self.found, former, are_in=False)
            self.found = _among(self.found, former)


def _among(
    hooks: Iterable[GradientHook], others: Iterable[GradientHook], *, are_in: bool = True
) -> list[GradientHook]:
    """Returns the hooks that are among others, or those that are not."""
    keys = {each.key for each in others}
    return [each for each in hooks if (each.key in keys) is are_in]


def accumulation_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Returns the user's hooks that run when a gradient has been added to a parameter's."""
    with past_function_modes():
        return [each for each in hooks_after_accumulation(tensor) if _is_of_user(each)]


def _hooks_of(name: str, parameter: torch.Tensor) -> Iterator[GradientHook]:
    for hook in hooks_on_gradient(parameter):
        several = hook_of_several(hook)
        function = hook if several is None else several.function
        if _is_of_user(function):
            yield GradientHook(parameter, name, Moment.GRADIENT, function, several)
    for hook in accumulation_hooks(parameter):
        yield GradientHook(parameter, name, Moment.AFTER, hook)
    # What another rank has in a step stands for itself between two steps.
    stands = getattr(getattr(parameter, "absent", None), "fake", None)
    for each in (parameter, stands):
        if each is not None and each.requires_grad and is_accumulation_kept(each):
            for moment, hooks in zip(_OF_NODES, hooks_of_accumulation(each), strict=True):
                for hook in filter(_is_of_user, hooks):
                    yield GradientHook(parameter, name, moment, hook)


def _is_of_user(function: Callable[..., Any]) -> bool:
    return is_code_of_others(module_of(function))
