"""Finding the stacks of experts of a model, each kind of which is tried once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.experts.spread import TAKEN
from smdistributed.modelparallel.torch.tensor_parallel.experts.stack import Stack, find_stack


def find_stacks(
    modules: Mapping[nn.Module, str | None], size: int
) -> tuple[dict[nn.Module, Stack], dict[nn.Module, str]]:
    """Returns how stacks are spread over ranks, and why others are not.

    Args:
        modules: that look like stacks, each with a reason to leave it whole, if there is one.
        size: how many ranks there are.
    """
    found: dict[nn.Module, Stack] = {}
    reasons: dict[nn.Module, str] = {}
    tried: dict[object, Stack | str] = {}
    for module, reason in modules.items():
        verdict: Stack | str | None = reason
        if verdict is None and any(hasattr(module, name) for name in TAKEN):
            verdict = f"it has an attribute named {', '.join(TAKEN[:-1])} or {TAKEN[-1]}"
        if verdict is None:
            kind = _kind_of(module)
            if kind not in tried:
                tried[kind] = _tried(module, size)
            verdict = tried[kind]
        if isinstance(verdict, Stack):
            found[module] = verdict
        else:
            reasons[module] = verdict
    return found, reasons


def check_stacks_agreed(
    found: Mapping[nn.Module, Stack],
    names: Mapping[nn.Module, str],
    everyones: Callable[[Any], list[Any]],
) -> None:
    """Checks that all ranks of the job have found the same. Collective: WORLD.

    Args:
        found: by this rank.
        names: of the modules that were looked at.
        everyones: gives what each rank has found.

    Raises:
        SMPError: they have not.
    """
    first, *others = everyones({names[module]: repr(stack) for module, stack in found.items()})
    for rank, each in enumerate(others, 1):
        for name in sorted({*first, *each}):
            if first.get(name) != each.get(name):
                said = [one.get(name, "no experts that can be spread") for one in (first, each)]
                raise SMPError(
                    f"the ranks of a job must spread the experts of {name or 'the model'} in the "
                    f"same way: build the same model on each. Rank 0 has found {said[0]}; rank "
                    f"{rank}: {said[1]}."
                )


def _tried(module: nn.Module, size: int) -> Stack | str:
    try:
        return find_stack(module, size)
    except RefutedError as error:
        return str(error)


def _kind_of(module: nn.Module) -> object:
    """Returns what stacks have in common that one trial serves."""
    shapes = [(name, tuple(each.shape)) for name, each in module.named_parameters()]
    plain = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
    }
    others = [type(each) for each in module.modules()]
    return type(module), str(
        (shapes, sorted(plain.items(), key=str), others, id(getattr(module, "config", None)))
    )
