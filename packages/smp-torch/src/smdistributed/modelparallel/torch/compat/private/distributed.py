"""Collectives and buckets of gradients, beyond PyTorch's public API."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    ProcessGroup,
    Reducer,
    _compute_bucket_assignment_by_size,
)
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch.distributed import distributed_c10d as functions


def default_store() -> Any:
    """Returns the store by which the processes of the job have met."""
    return functions._get_default_store()


def all_gather_into(output: torch.Tensor, given: torch.Tensor, group: ProcessGroup) -> None:
    """Gathers equal tensors, one after the other along dim 0; by the name it has in this torch."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(output, given, group=group)


def all_gather_each_into(
    outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], group: ProcessGroup
) -> None:
    """Gathers several tensors as ``all_gather_into`` does each, in one exchange."""
    targets, sources = ([real(each) for each in tensors] for tensors in (outputs, given))
    group.allgather_into_tensor_coalesced(targets, sources).wait()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a tensor that can be exchanged in any way: complex numbers cannot."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def reduce_scatter_into(output: torch.Tensor, given: torch.Tensor, group: ProcessGroup) -> None:
    """Sums tensors and scatters the sum; by the name it has in this torch."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, given, group=group)


def is_future(obj: object) -> bool:
    """Tells whether an object is a future, as communication hooks return them."""
    return isinstance(obj, torch._C.Future)


def gradient_buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[GradBucket]:
    """Distributes parameters over buckets, the last parameters first.

    Args:
        parameters: those to reduce; at least one.
        cap_bytes: size of a bucket; the first is smaller, so that communication begins early.
    """
    dense = [False] * len(parameters)
    first_bytes = min(_DEFAULT_FIRST_BUCKET_BYTES, cap_bytes)
    indices, limits = _compute_bucket_assignment_by_size(
        list(parameters), [first_bytes, cap_bytes], dense
    )
    # Only torch's reducer can make a GradBucket. It serves for that alone, so it needs no peers;
    # when a gradient is final is for the caller to know, who differentiates in several passes.
    no_peers = ProcessGroup(0, 1)  # type: ignore[call-arg]
    reducer = Reducer(list(parameters), indices[::-1], limits[::-1], no_peers, dense, cap_bytes)
    reducer._remove_autograd_hooks()
    return list(reducer._get_zeros_like_grad_buckets())


def exchanges(function: object) -> bool:
    """Whether a function that a mode sees is one of ``torch.distributed``: it exchanges tensors."""
    return getattr(function, "__module__", "") == functions.__name__


@contextlib.contextmanager
def collectives_seen(see: Callable[[str, ProcessGroup], None]) -> Iterator[None]:
    """Tells of the calls of ``torch.distributed`` that ranks of a group make together.

    Each of its functions asks whether this process is in the group before it does anything, and
    those that exchange something, with others, can warn that it is not.

    Args:
        see: is told the name of the function, and the group.
    """
    is_outside = functions._rank_not_in_group

    def ask(group: ProcessGroup | None) -> bool:
        found, caller = group or functions.GroupMember.WORLD, sys._getframe(1).f_code
        takes_part = functions._warn_not_in_group.__name__ in caller.co_names
        if takes_part and isinstance(found, ProcessGroup) and found.size() > 1:
            see(caller.co_name, found)
        return is_outside(group)

    functions._rank_not_in_group = ask
    try:
        yield
    finally:
        functions._rank_not_in_group = is_outside
