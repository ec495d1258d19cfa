"""Distributed modules that are called where no model runs: those of a copy of one.

A copy has slices, as the model has. Beside a pipeline it has those of the own partition alone, and
absent tensors in the places of the others, whole ones. All ranks run the same script, so all of a
pipeline make the call: for its time each has its slice of every parameter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence import following, owned
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor, make_present
from smdistributed.modelparallel.torch.compat.private.modes import pytree
from smdistributed.modelparallel.torch.parts import at_rest
from smdistributed.modelparallel.torch.parts.at_rest import InParts, show
from smdistributed.modelparallel.torch.parts.blocks import taken
from smdistributed.modelparallel.torch.tensors.nested import map_tensors


def call_between_steps(
    forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Calls the forward of a distributed module that no model has which runs.

    Collective: TP_GROUP, and PP_GROUP beside a pipeline.

    Args:
        forward: of the module.
        module: in a copy of a model, say.
        args: by position.
        kwargs: by name.

    Returns:
        what it returns; beside a pipeline a gradient through that is refused.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(map(_is_of_one, tensors)):
        with contextlib.ExitStack() as stack:
            for each in tensors:
                if hasattr(type(each), "awake"):  # a slice between steps
                    stack.enter_context(each.awake())  # type: ignore[attr-defined]
            return forward(module, *args, **kwargs)
    given = pytree.tree_map(_known_everywhere, (tuple(args), dict(kwargs)))
    leaves = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
    with _own_slices_in(module), torch.no_grad():
        result = forward(module, *given[0], **given[1])
    if torch.is_grad_enabled() and any(each.requires_grad for each in (*tensors, *leaves)):
        return map_tensors(result, functools.partial(_Undifferentiated.apply, _anchor(), module))
    return result


class _Undifferentiated(torch.autograd.Function):
    """What a module of a copy gives: its parameters are not where a gradient would be computed."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, module: nn.Module, result: torch.Tensor) -> Any:
        ctx.kind = type(module).__name__
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise UnsupportedError(
            f"a gradient is asked for through a {ctx.kind} of a copy of a model, of whose "
            "parameters the tensor-parallel ranks of one partition have slices: wrap the copy by "
            "smp.DistributedModel, and call it in a step function."
        )


def _anchor() -> torch.Tensor:
    """Returns what has a result require a gradient."""
    return torch.empty(0, requires_grad=True)


def _is_of_one(tensor: Any) -> bool:
    """Whether the ranks of one partition alone have a tensor."""
    return owned.is_owned(tensor) or isinstance(tensor, AbsentTensor)


def _known_everywhere(value: Any) -> Any:
    """Returns a tensor of one partition as one that every rank has whole. Collective: PP_GROUP."""
    if not _is_of_one(value):
        return value
    # As a script calls it: code of this library gets tensors as they are.
    if isinstance(value, InParts):
        clone = at_rest.run
    else:
        clone = following.run if isinstance(value, AbsentTensor) else owned.follow
    with torch.no_grad():
        whole = clone(torch.Tensor.clone, (value,), {})
    following.make_whole([whole])
    return whole


@contextlib.contextmanager
def _own_slices_in(module: nn.Module) -> Iterator[None]:
    """Has the slices of this rank be in a module, wherever its parameters are."""
    replaced = []
    for tensor, value in _values_in(module):
        made = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
        for each in module.modules():
            for table in (each._parameters, each._buffers):
                for name in [name for name, found in table.items() if found is tensor]:
                    replaced.append((table, name, tensor))
                    table[name] = made  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor  # type: ignore[assignment]


def take_copy(module: nn.Module) -> None:
    """Gives every rank what it uses of a copy that becomes a model. Collective: PP_GROUP."""
    for tensor, value in _values_in(module):
        owned.wake(tensor)
        if isinstance(tensor, AbsentTensor):
            make_present(tensor, value)
        else:
            show(tensor, value)


def _values_in(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the tensors of one partition in a module, and what this rank uses of each."""
    parts = {
        id(tensor): kept.part(each.tensor_group.size, each.tensor_group.rank)
        for each in _distributed_in(module)
        for name, tensor in each._parameters.items()
        if (kept := each.slice_of(name)) is not None
    }
    for tensor in [*module.parameters(), *module.buffers()]:
        if _is_of_one(tensor):
            whole = _known_everywhere(tensor)
            part = parts.get(id(tensor))
            yield tensor, whole if part is None else taken(whole, part).clone()


def _distributed_in(module: nn.Module) -> Iterator[Any]:
    return (each for each in module.modules() if hasattr(each, "slice_of"))
