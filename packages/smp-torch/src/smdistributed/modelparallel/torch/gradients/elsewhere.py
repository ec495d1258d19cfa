"""What a script sees as a gradient that the rank which updates its parameter has alone.

With ``shard_optimizer_state`` the mean over the replicas goes to the owner of a parameter. A script
runs on all ranks, so the others see something in its place: it has no numbers, changes of them one
by one are left to the owner, and what asks for them is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import is_in_backward
from smdistributed.modelparallel.torch.compat.private.below import (
    past_operations,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.compat.private.tensors import NUMBERS_OF_MANY
from smdistributed.modelparallel.torch.parts.arguments import leaves_of, name_of
from smdistributed.modelparallel.torch.tensors.functions import (
    ABOUT,
    OF_OBJECTS,
    methods_of_tensors,
)

#: What concerns the object, and not its values.
_ABOUT = ABOUT | OF_OBJECTS | {torch.Tensor.requires_grad_}
#: What the owner does, one number after the other, and no other rank needs to.
_IN_PLACE = methods_of_tensors(
    "mul_ div_ add_ sub_ zero_ fill_ copy_ clamp_ clamp_min_ clamp_max_ nan_to_num_ neg_ lerp_ "
    "addcmul_ addcdiv_ sign_ detach_"
)


class GradientElsewhere(torch.Tensor):
    """See the module.

    Attributes:
        name_of_parameter: whose gradient it is.
        owner: the rank that has it.
    """

    name_of_parameter: str
    owner: int

    @classmethod
    def of(cls, parameter: torch.Tensor, name: str, owner: int) -> GradientElsewhere:
        """Returns what stands for the gradient of a parameter.

        Args:
            parameter: of this rank.
            name: its name.
            owner: the rank that has the gradient.
        """
        made = torch.empty(0, dtype=parameter.dtype, device=parameter.device).as_subclass(cls)
        with past_subclass_functions(), past_operations():
            made.data = without_memory(parameter.shape, parameter.dtype, parameter.device)
        made.name_of_parameter, made.owner = name, owner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got such a gradient."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        others = [*args[1:], *kwargs.values()]
        is_alone = not any(isinstance(each, cls) for each in leaves_of(others))
        with past_subclass_functions():
            if own is not None and func in _ABOUT:
                return func(*args, **kwargs)
            if own is not None and func in _IN_PLACE and is_alone:
                return own
            if func in NUMBERS_OF_MANY and is_alone:
                return _of_those_here(func, *args, **kwargs)
        return cls.operate(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that came past functions of torch; see ``compat.private.below``.

        Autograd adds to it what a later backward pass gives: for this rank that is the first.

        Raises:
            UnsupportedError: it is not autograd that does so.
        """
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and is_in_backward():
            if func is torch.ops.aten.add.Tensor:
                return args[1]
            if func is torch.ops.aten.add_.Tensor:
                with past_subclass_functions(), past_operations():
                    own.data = args[1].detach().clone()
                made: Any = own
                made.__class__ = torch.Tensor
                return made
        found = [each for each in leaves_of((args, kwargs)) if isinstance(each, cls)]
        raise UnsupportedError(
            f"{name_of(func)} asks for the gradient of {found[0].name_of_parameter}, which with "
            f"shard_optimizer_state rank {found[0].owner} has alone, as it updates that parameter: "
            "update by an optimizer in smp.DistributedOptimizer, clip by smp.clip_grad_norm_, and "
            "change gradients in place, on every rank (gradient.mul_)."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is."""
        return f"GradientElsewhere({self.name_of_parameter}, on rank {self.owner})"


class StandIns:
    """What stands for the gradients of parameters that others update."""

    def __init__(self) -> None:
        self._known: dict[torch.Tensor, torch.Tensor] = {}
        self._before: set[torch.Tensor] = set()

    def forget(self) -> None:
        """Makes new ones from now on: parameters have changed."""
        self._known.clear()

    def remove(self, parameters: Iterable[torch.Tensor]) -> None:
        """Takes them away before a step, which adds up gradients of its own."""
        self._before.clear()
        for each in parameters:
            if isinstance(each.grad, GradientElsewhere):
                self._before.add(each)
                each.grad = None

    def put(self, parameter: torch.Tensor, name: str, owner: int, *, is_used: bool) -> None:
        """Shows that another rank has the gradient of a parameter, if it has one.

        Args:
            parameter: of this rank.
            name: its name.
            owner: the rank that has the gradient.
            is_used: whether the step has given one.
        """
        if not is_used and parameter not in self._before:
            parameter.grad = None
            return
        known = self._known.get(parameter)
        if not isinstance(known, GradientElsewhere):  # or autograd has added to it since
            known = self._known[parameter] = GradientElsewhere.of(parameter, name, owner)
        parameter.grad = known


def _of_those_here(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a function of many tensors on those that are here."""
    places = [at for at, each in enumerate(tensors) if not isinstance(each, GradientElsewhere)]
    if not places:
        return

    def chosen(value: Any) -> Any:
        is_list = isinstance(value, list | tuple)
        return [value[place] for place in places] if is_list else value

    func(chosen(tensors), *map(chosen, args), **{key: chosen(kwargs[key]) for key in kwargs})
