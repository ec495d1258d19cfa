"""What all distributed modules have in common: ``smp.nn.DistributedModule``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Registering Tensor Parallelism Distributed
Modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from smdistributed.modelparallel.common.pieces import Bands, Part, Rectangle
from smdistributed.modelparallel.torch.parts.blocks import put, taken
from smdistributed.modelparallel.torch.tensor_parallel.copied import call_between_steps
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import used_slice
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    SliceGuard,
    SliceSlot,
    using_own_slices,
)

#: From one form of a state to another: whole tensors by name.
StateTranslation = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
#: Gives a tensor its initial values, in place.
Initialise = Callable[[torch.Tensor], Any]


@dataclass
class Slice:
    """Which slice of a whole tensor a parameter of a distributed module is.

    Attributes:
        shape: of the whole tensor.
        dim: along which it is cut into equal slices, one a tensor-parallel rank.
        sections: sizes along ``dim`` of what was fused into one tensor, such as query, key and
            value: a slice has its share of each. Empty where nothing was.
        initialise: gives the whole tensor its values.
        drawn_from: the state of the generator that drew them; None where none did.
        version: of the parameter when it had them.
    """

    shape: tuple[int, ...]
    dim: int
    initialise: Initialise
    drawn_from: torch.Tensor | None
    version: int
    sections: tuple[int, ...] = ()

    def part(self, size: int, rank: int) -> Part:
        """Returns what one of ``size`` ranks holds."""
        whole = Rectangle.whole(self.shape)
        if not self.sections:
            return whole.cut(self.dim, size, rank)
        found, start = [], 0
        for length in self.sections:
            sizes = (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])
            offsets = (*[0] * self.dim, start, *[0] * (len(sizes) - self.dim - 1))
            found.append(Rectangle(offsets, sizes).cut(self.dim, size, rank))
            start += length
        return Bands(tuple(found), self.dim)


class DistributedModule(nn.Module):
    """A module that the tensor-parallel ranks compute together.

    Base of every class that stands for another one under ``smp.tensor_parallelism``. A subclass of
    your own has an ``__init__`` and a ``forward``; its split parameters are made by
    ``add_slice``. Constructing one is local. Its forward and backward passes are collective:
    TP_GROUP. While a ``DistributedModel`` or a step function runs, ``forward`` alone has the split
    parameters: other code that reads them gets an ``UnsupportedError``.

    Attributes:
        translations: of its state, to the form of the module that it stands for, and back; None
            where both are the same.
        stands_for: the class of the module in whose place it is; None where a script has made it.
        has_split_children: the partitions of a pipeline may divide it: they share no exchange of
            its own.
        takes_tuple: it is called with one tuple of all its inputs.
    """

    stands_for: type[nn.Module] | None = None
    has_split_children: ClassVar[bool] = False
    takes_tuple: ClassVar[bool] = False
    _group: ClassVar[TensorGroup] = TensorGroup()
    _makes_values: ClassVar[bool] = True

    def __init_subclass__(cls, *, is_part: bool = False, **kwargs: Any) -> None:
        """Gives its forward the split parameters.

        Args:
            is_part: it is called by another distributed module alone, whose forward has them.
        """
        super().__init_subclass__(**kwargs)
        forward = vars(cls).get("forward")
        if forward is not None and not is_part:
            cls.forward = using_own_slices(forward, call_between_steps)

    def __init__(self) -> None:
        super().__init__()
        self._slices: dict[str, Slice] = {}
        #: Tells it from all others of its model, the same on every rank.
        self.place = type(self).__name__
        self.translations: tuple[StateTranslation, StateTranslation] | None = None

    @property
    def tensor_group(self) -> TensorGroup:
        """The ranks that compute it together."""
        return DistributedModule._group

    def add_slice(
        self,
        name: str,
        shape: Sequence[int],
        dim: int,
        initialise: Initialise,
        *,
        sections: Sequence[int] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """Makes a parameter of which this rank has its slice.

        The whole tensor is drawn and cut, so that the values, and what is drawn after them, are
        those of one rank alone.

        Shape: the parameter has that of the whole, but for its share along ``dim``.

        Args:
            name: of the parameter.
            shape: of the whole tensor.
            dim: along which it is split; ``tp_size`` divides its size.
            initialise: gives a tensor of this shape its values, in place.
            sections: sizes along ``dim`` of what is fused in it, such as query, key and value;
                the slice has a share of each, one after the other. None: nothing is.
            device: as in ``torch.empty``.
            dtype: as in ``torch.empty``.

        Returns:
            the parameter.

        Raises:
            ValueError: ``tp_size`` does not divide the size, or that of a section; or the sections
                do not make the whole.
        """
        group = self.tensor_group
        where = f"{name} along dim {dim}"
        if sections and sum(sections) != shape[dim]:
            raise ValueError(
                f"sections of {where} must add up to {shape[dim]}; received {list(sections)}."
            )
        for length in sections or (shape[dim],):
            require_divisible(type(self).__name__, where, length, group.size)
        if not DistributedModule._makes_values:
            local = [*shape[:dim], shape[dim] // group.size, *shape[dim + 1 :]]
            parameter = nn.Parameter(torch.empty(local, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
            self._slices[name] = Slice(tuple(shape), dim, initialise, None, 0, tuple(sections))
            return parameter
        full = torch.empty(tuple(shape), device=device, dtype=dtype)
        before = random_state(full.device)
        with torch.no_grad():
            initialise(full)
            is_drawn = group.size > 1 and not torch.equal(before, random_state(full.device))
            drawn_from = before if is_drawn else None
            kept = Slice(tuple(shape), dim, initialise, drawn_from, 0, tuple(sections))
            if group.size > 1:
                full = taken(full, kept.part(group.size, group.rank)).clone(
                    memory_format=torch.contiguous_format
                )
        parameter = nn.Parameter(full)
        kept.version = parameter._version
        self.register_parameter(name, parameter)
        self._slices[name] = kept
        return parameter

    def use_slice(self, name: str) -> torch.Tensor:
        """Returns a split parameter, for use by the examples of all ranks.

        Its gradient is then the mean over the ranks, each of which counts by its own loss.

        Args:
            name: of a parameter that ``add_slice`` has made.
        """
        return used_slice(self.tensor_group, self._parameters[name])  # type: ignore[arg-type]

    def whole_of(self, name: str) -> torch.Tensor:
        """Returns the whole of a split parameter, without a graph. Collective: TP_GROUP.

        Args:
            name: of a parameter that ``add_slice`` has made.
        """
        group, kept = self.tensor_group, self._slices[name]
        own: Any = self._parameters[name]
        found = group.collectives.gather(own.detach().contiguous()[None], [1] * group.size)
        whole = found[0].new_empty(kept.shape)
        for rank, each in enumerate(found):
            put(whole, kept.part(group.size, rank), each)
        return whole

    def slice_of(self, name: str) -> Slice | None:
        """Returns which slice a parameter of this module is; None if it is whole."""
        return self._slices.get(name) if self.tensor_group.size > 1 else None

    def drawn_slices(self) -> Iterator[tuple[str, Slice]]:
        """Yields the parameters whose values were drawn here and not changed since."""
        for name, kept in self._slices.items():
            parameter = self._parameters.get(name)
            if parameter is None or kept.drawn_from is None:
                continue
            if parameter._version == kept.version:
                yield name, kept


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the generator that draws on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def require_divisible(who: str, what: str, number: int, size: int) -> None:
    """Raises unless the tensor-parallel ranks can share a number of things evenly.

    Raises:
        ValueError: names both numbers.
    """
    if number % size:
        raise ValueError(
            f"{who}: tensor_parallel_degree ({size}) must divide {what} ({number}): use a degree "
            "that does, or leave the module whole."
        )


def name_places(model: nn.Module) -> None:
    """Has distributed modules know their names: ranks compare which of them they call."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedModule):
            module.place = f"{name or 'the model'} ({type(module).__name__})"


def places_in(module: nn.Module) -> list[str]:
    """Returns the names of the distributed modules in a module, itself included."""
    return [each.place for each in module.modules() if isinstance(each, DistributedModule)]


def guard_of(model: nn.Module, name: str = "") -> SliceGuard:
    """Returns what refuses reads of the slices of a model, or of a module of a name in it."""
    distributed = [each for each in model.modules() if isinstance(each, DistributedModule)]
    slices = {
        id(parameter): kept
        for module in distributed
        for attribute, parameter in module._parameters.items()
        if (kept := module.slice_of(attribute)) is not None
    }
    size = DistributedModule._group.size

    def slot(module: nn.Module, attribute: str, name: str, kept: Slice) -> SliceSlot:
        parts = tuple(kept.part(size, rank) for rank in range(size))
        return SliceSlot(module, attribute, name, kept.shape, parts)

    slots = {
        module: [
            slot(module, attribute, f"{prefix}.{attribute}".lstrip("."), slices[id(parameter)])
            for attribute, parameter in module._parameters.items()
            if id(parameter) in slices  # one that is tied is there twice
        ]
        for prefix, module in model.named_modules(prefix=name)
    }
    inside: dict[nn.Module, list[SliceSlot]] = {
        module: [slot for each in module.modules() for slot in slots[each]]
        for module in distributed
    }
    return SliceGuard([slot for found in slots.values() for slot in found], inside)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Inside, slices are made without values: they get others anyway."""
    DistributedModule._makes_values = False
    try:
        yield
    finally:
        DistributedModule._makes_values = True


@contextlib.contextmanager
def distributed_modules_in(group: TensorGroup) -> Iterator[None]:
    """Makes distributed modules those of a job, as long as it is entered."""
    former = DistributedModule._group
    DistributedModule._group = group
    try:
        yield
    finally:
        DistributedModule._group = former


def distributed_modules_on_trial() -> contextlib.AbstractContextManager[None]:
    """Has this rank call distributed modules by itself, for the shapes of what they return."""
    return distributed_modules_in(DistributedModule._group.for_trials())
