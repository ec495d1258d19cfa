"""What autograd keeps of sharded parameters: not their memory, but where to get them again.

Source: model-parallel-extended-features-pytorch-sharded-data-parallelism.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.torch.activations.kept import KEEPING, Kept, SavingHooks
from smdistributed.modelparallel.torch.compat.between import no_call
from smdistributed.modelparallel.torch.compat.private.backward import lifted_by_transforms
from smdistributed.modelparallel.torch.compat.private.compiled import never_compiled
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter
from smdistributed.modelparallel.torch.sharding.unit import Unit


class Gathered(Protocol):
    """The gathered units of a model."""

    generation: int

    def unit_at(self, key: int) -> Unit | None:
        """Returns the unit whose gathered memory this is."""

    def memory_of(self, unit: int) -> torch.Tensor:
        """Returns the gathered memory of a unit."""


@dataclass(frozen=True)
class _InUnit:
    """A tensor in the gathered memory of a unit."""

    home: Gathered
    unit: int
    generation: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def saving_places(homes: Sequence[Gathered]) -> Iterator[SavingHooks]:
    """Has autograd keep places of gathered parameters, and gather them again for backward.

    Yields the hooks that do so, for who saves tensors by hooks of its own inside.
    """
    if not homes:
        yield KEEPING
        return

    @never_compiled
    @no_call
    def pack(tensor: torch.Tensor) -> Any:
        key = None
        if isinstance(tensor, ShardedParameter):
            shard = tensor.shard
            home: Any = shard.home
            with torch.no_grad():
                view = home.view_of(shard)
            return _InUnit(
                home, shard.unit, home.generation, view.size(), view.stride(), view.storage_offset()
            )
        if tensor.layout is torch.strided:
            key = storage_of(tensor)
        for home in homes:
            unit = None if key is None else home.unit_at(key)
            if unit is not None and tensor.dtype is unit.dtype:
                return _InUnit(
                    home,
                    unit.number,
                    home.generation,
                    tensor.size(),
                    tensor.stride(),
                    int(tensor.storage_offset()),
                )
        return Kept.of(tensor)

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, _unpack),
        lifted_by_transforms(pack, _unpack),
    ):
        yield SavingHooks(pack, _unpack)


@no_call
def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _InUnit):
        if saved.generation != saved.home.generation:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a sharded parameter was updated between forward and backward."
            )
        memory = saved.home.memory_of(saved.unit)
        return memory.as_strided(saved.size, saved.stride, saved.offset)
    tensor: torch.Tensor = saved.get()
    return tensor
