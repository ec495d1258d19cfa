"""Calls of a module, and of the slices of all ranks, in one process.

The slices of each rank run up to a sum whose shares are not there yet. When each rank has given its
own, all run again, and are given the sum, until they come to their ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.private.checkpointing import checkpointing_left_out
from smdistributed.modelparallel.torch.parts.blocks import taken
from smdistributed.modelparallel.torch.state import reads as state_reads
from smdistributed.modelparallel.torch.state.python_random import python_draws
from smdistributed.modelparallel.torch.tensor_parallel.auto.adapting import Adapting
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.draws import NotedDraws
from smdistributed.modelparallel.torch.tensor_parallel.auto.kept import tensors_kept_in
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan, cut
from smdistributed.modelparallel.torch.tensor_parallel.auto.statistics import AddUp, Reduction
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import copied_with
from smdistributed.modelparallel.torch.tensor_parallel.auto.trial_sums import (
    PausedError,
    TrialSums,
)
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    DistributedModule,
    distributed_modules_in,
)
from smdistributed.modelparallel.torch.tensors.reads import Reads

#: What slices give, the shapes of what they drop from, what they met, and what they keep.
OfSlices = tuple[Call, list[tuple[int, ...]], Adapting, dict[str, torch.Tensor]]


def tried(
    module: nn.Module, arguments: Any, adapting: Adapting | None = None
) -> tuple[Call, list[tuple[int, ...]], list[Reduction]]:
    """Calls a module without dropout; returns its result, and the shapes of what is dropped from.

    Args:
        module: to call.
        arguments: of the call.
        adapting: of the functions that it calls to slices; None: it is whole.

    Returns:
        both, and how a whole one reduces.

    Raises:
        RefutedError: the call fails, or draws in another way than by dropout.
    """
    args, kwargs = arguments
    before, draws_python = torch.get_rng_state(), python_draws()
    noted = NotedDraws(adapting)
    try:
        # What is computed again is what it was, so that is no part of what slices are tried for.
        with checkpointing_left_out(), noted:
            result = Call(module(*args, **kwargs))
    except SMPError as error:
        raise RefutedError(str(error)) from error
    except Exception as error:  # any code may run here
        first = (str(error).splitlines() or [""])[0]
        raise RefutedError(f"{type(error).__name__}: {first}") from error
    if draws_python() or not torch.equal(before, torch.get_rng_state()):
        raise RefutedError("it draws random numbers in another way than by dropout")
    return result, noted.shapes, noted.reductions


def tried_in_slices(
    whole: nn.Module,
    plan: Plan,
    size: int,
    arguments: Any,
    read: set[tuple[str, str]],
    adapting_of: Callable[[int, AddUp], Adapting],
) -> list[OfSlices]:
    """Returns what the slices of each rank give, which may have made sums between them.

    Args:
        whole: the module.
        plan: how it is split.
        size: over how many ranks.
        arguments: of the call.
        read: gets the attributes that slices have read.
        adapting_of: gives what adapts the calls of a rank, from that and what adds up.

    Raises:
        RefutedError: slices cannot be called, or sum at other places.
    """

    def call(rank: int, sums: TrialSums) -> OfSlices:
        sums.begin()
        part = copied_with(whole, _as_it_is, torch.clone)
        return _called(
            part, plan, size, rank, arguments, read, sums, adapting_of(rank, sums.add_up)
        )

    sums = TrialSums()
    while True:
        found = []
        for rank in range(size):
            with contextlib.suppress(PausedError):
                found.append(call(rank, sums))
        try:
            if not sums.go_on(size):
                return found
        except ValueError as error:
            raise RefutedError(str(error)) from error


def _called(
    part: nn.Module,
    plan: Plan,
    size: int,
    rank: int,
    arguments: Any,
    read: set[tuple[str, str]],
    sums: TrialSums,
    adapting: Adapting,
) -> OfSlices:
    """Returns what the slices of one rank give; the module becomes one of these."""
    with distributed_modules_in(Pretended(size, rank)):
        gate = cut(part, plan, size, functools.partial(_slice, rank))
        gate.is_open, gate.add_up = True, lambda group, share: sums.add_up(share)
        try:
            with (
                Reads(_owners(part), gate.is_used_by) as reads,
                state_reads.noted(part) as read_of_part,
            ):
                result, shapes, _ = tried(part, arguments, adapting)
        finally:
            gate.is_open = False  # as where ranks differentiate, which the module is no part of
        read |= read_of_part
        if reads.found:
            raise RefutedError(f"its code reads {reads.found[0]} by itself")
    return result, shapes, adapting, tensors_kept_in(part)


class Pretended(TensorGroup):
    """A group for slices that are tried in one process."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.size, self.rank = size, rank


def _owners(module: nn.Module) -> dict[int, str]:
    """Returns the names of slices, by their ids."""
    return {
        id(parameter): name
        for owner, inner in module.named_modules()
        if isinstance(inner, DistributedModule)
        for name, parameter in inner.named_parameters(owner, recurse=False)
    }


def _as_it_is(parameter: nn.Parameter) -> torch.Tensor:
    return parameter


def _slice(rank: int, name: str, linear: nn.Module, made: DistributedModule) -> None:
    """Gives a slice its share of the values of the whole."""
    for each, _ in list(made.named_parameters(recurse=False)):
        whole: torch.Tensor = linear.get_parameter(each)
        kept = made.slice_of(each)
        if kept is not None:
            whole = taken(whole, kept.part(made.tensor_group.size, rank))
        made._parameters[each] = nn.Parameter(
            whole.detach(), requires_grad=linear.get_parameter(each).requires_grad
        )
