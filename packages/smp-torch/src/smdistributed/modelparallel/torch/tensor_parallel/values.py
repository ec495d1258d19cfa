"""The values of distributed modules: those that the first rank of the group has, in slices."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from smdistributed.modelparallel.torch.building.delayed_parameters import DelayedParameters
from smdistributed.modelparallel.torch.parts.blocks import taken
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    DistributedModule,
    Slice,
)
from smdistributed.modelparallel.torch.tensor_parallel.registry import Translation


class ValuesOfFirst:
    """Gives the ranks of a group the values of the first of them. Collective: TP_GROUP.

    Args:
        group: the ranks.
        delayed: the parameters that have no values yet.
    """

    def __init__(self, group: TensorGroup, delayed: DelayedParameters) -> None:
        self._group = group
        self._delayed = delayed

    def translated(
        self, original: Mapping[str, torch.Tensor], translation: Translation | None
    ) -> dict[str, torch.Tensor]:
        """Returns whole values by the names that they get.

        Args:
            original: by the names that they have.
            translation: to the names and shapes that they get; None keeps them.
        """
        common = self._of_first(original)
        waits = any(map(self._is_delayed, common.values()))
        with torch.no_grad(), self._delayed.delaying(only=waits):
            return dict(common if translation is None else translation(common))

    def put(
        self,
        module: nn.Module,
        name: str,
        whole: torch.Tensor,
        like: torch.Tensor | None,
    ) -> None:
        """Gives a parameter or buffer of a distributed module its slice, or the whole.

        Args:
            module: the distributed module.
            name: in it.
            whole: the values.
            like: says whether the parameter trains; None: it does.
        """
        owner, _, attribute = name.rpartition(".")
        inner = module.get_submodule(owner)
        kept = inner.slice_of(attribute) if isinstance(inner, DistributedModule) else None
        with torch.no_grad(), self._delayed.delaying(only=self._is_delayed(whole)):
            if kept is not None:
                whole = taken(whole.detach(), kept.part(self._group.size, self._group.rank))
            values = whole.detach().clone(memory_format=torch.contiguous_format)
        if attribute in inner._buffers:
            inner._buffers[attribute] = values
            return
        has_gradient = values.is_floating_point() or values.is_complex()
        trains = has_gradient and (like is None or like.requires_grad)
        inner._parameters[attribute] = nn.Parameter(values, requires_grad=trains)

    def draw(self, module: DistributedModule, make: Callable[[], DistributedModule]) -> None:
        """Gives a module the values of a new one, drawn as the first rank draws it."""
        former = torch.get_rng_state()
        torch.set_rng_state(self._group.from_first(former))
        fresh = make()
        if self._group.rank:
            torch.set_rng_state(former)
        module.load_state_dict(fresh.state_dict())

    def unify(self, model: nn.Module) -> None:
        """Draws slices again where the generators of the ranks differed when they were made."""
        drawn = list(_drawn(model))
        states = b"".join(_bytes(kept.drawn_from) for _, _, kept in drawn)
        digests = self._group.everyones([len(drawn), zlib.crc32(states)])
        if all(each == digests[0] for each in digests):
            for _, _, kept in drawn:
                kept.drawn_from = None
            return
        for module, name, kept in drawn:
            assert kept.drawn_from is not None
            state = self._group.from_first(kept.drawn_from)
            parameter = module._parameters[name]
            assert parameter is not None
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            whole = torch.empty(kept.shape, dtype=parameter.dtype, device=device)
            with torch.no_grad(), _drawing_from(state, device):
                kept.initialise(whole)
            values = taken(whole, kept.part(self._group.size, self._group.rank))
            if self._is_delayed(parameter):
                self._delayed.become(parameter, values.clone())
            else:
                parameter.data.copy_(values)
            kept.drawn_from = None

    def _is_delayed(self, tensor: torch.Tensor) -> bool:
        return self._delayed.holds(tensor)

    def _of_first(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors of the first rank; delayed ones as they are, if all have the same."""
        group, delayed = self._group, self._delayed
        digests = [
            zlib.crc32(delayed.origin(each)) if self._is_delayed(each) else 0
            for each in tensors.values()
        ]
        everyones = group.everyones(digests) if digests else []
        found = {}
        for place, (name, tensor) in enumerate(tensors.items()):
            if self._is_delayed(tensor):
                if len({each[place] for each in everyones}) == 1:
                    found[name] = tensor
                    continue
                if group.rank == 0:
                    tensor = delayed.compute(tensor)
                else:
                    tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            found[name] = group.from_first(tensor.detach())
        return found


def _drawn(model: nn.Module) -> Iterator[tuple[DistributedModule, str, Slice]]:
    for module in model.modules():
        if isinstance(module, DistributedModule):
            for name, kept in module.drawn_slices():
                yield module, name, kept


@contextlib.contextmanager
def _drawing_from(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Has the generator of a device in a state, and puts it back."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield


def _bytes(state: torch.Tensor | None) -> bytes:
    return b"" if state is None else state.numpy().tobytes()
