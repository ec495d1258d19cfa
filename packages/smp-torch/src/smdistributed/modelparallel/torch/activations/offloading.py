"""Activations that checkpointing saves, in host memory until their backward pass comes near.

A checkpointed function saves what it is called with. Torch's hooks for saved tensors take that
here: an activation goes to the host, and comes back ``activation_loading_horizon`` tasks before
the backward pass that needs it (``horizon`` says what a task is). One that is needed sooner than
that when it is saved stays. If the order is another one than was expected an activation is late and
its backward pass waits for it, but never wrong.

What is not an activation stays as it is: parameters, tensors without gradients such as masks, and
whatever a checkpointed function reads other than from its positional arguments. So does a tensor
that is not laid out densely, since a copy of it would be laid out otherwise, and could make other
rounding errors.

Source: model-parallel-extended-features-pytorch-activation-offloading.md.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.modelparallel.torch.activations.copies import (
    Arrival,
    Copies,
    HostCopy,
    copies_for,
)
from smdistributed.modelparallel.torch.activations.horizon import Horizon, Pass, Region
from smdistributed.modelparallel.torch.activations.kept import KEEPING, Kept, SavingHooks
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.compat.private.compiled import around_compiled


@dataclass
class ActivationMemory:
    """Where the activations that checkpointing saved were, on one rank, in one call of a step.

    Attributes:
        peak_device_bytes: the most that were on the device at a time: not gone, or back.
        peak_host_bytes: the most that were in host memory at a time.
        stored_bytes: what went to the host in all.
        fetched_bytes: what came back in all.
        num_late: how many were asked for before they were on their way back.
    """

    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    stored_bytes: int = 0
    fetched_bytes: int = 0
    num_late: int = 0


class _Meter:
    """Counts the bytes of activations."""

    def __init__(self) -> None:
        self.device_bytes = self.host_bytes = 0
        self.memory = ActivationMemory()

    def begin(self) -> None:
        self.memory = ActivationMemory(self.device_bytes, self.host_bytes)

    def on_device(self, num_bytes: int) -> None:
        self.device_bytes += num_bytes
        memory = self.memory
        memory.peak_device_bytes = max(memory.peak_device_bytes, self.device_bytes)

    def on_host(self, num_bytes: int) -> None:
        self.host_bytes += num_bytes
        self.memory.peak_host_bytes = max(self.memory.peak_host_bytes, self.host_bytes)


class Offloading:
    """Moves the activations of one step function.

    Args:
        num_tasks: how far ahead activations come back.
        device: where they are made.
        name: of the step function, for messages.

    Attributes:
        has_regions: whether anything was checkpointed so far.
    """

    def __init__(self, num_tasks: int, device: torch.device, name: str) -> None:
        self._device = device
        self._name = name
        self._has_warned = False
        self._copies = copies_for(device)
        self._horizon: Horizon[weakref.ref[_Saved]] = Horizon(num_tasks)
        self._meter = _Meter()
        self._saving = KEEPING
        self._inside = threading.local()
        self._region: Region[weakref.ref[_Saved]] | None = None
        self._places = WeakIdKeyDictionary()
        self._compiled_calls: list[contextlib.ExitStack] = []
        self.has_regions = False

    @property
    def memory(self) -> ActivationMemory:
        """Where activations were in the last call."""
        return self._meter.memory

    @contextlib.contextmanager
    def running(
        self, passes: Sequence[Pass], saving: SavingHooks, compiled: Iterable[nn.Module]
    ) -> Iterator[None]:
        """Inside, a step runs; what checkpointing saves is taken.

        Args:
            passes: of this rank, in their order.
            saving: what tensors that are no activations are saved with.
            compiled: modules that are compiled together with their checkpointing.
        """
        self._saving = saving
        self._inside = threading.local()
        self._meter.begin()
        self._horizon.begin(passes)
        handles = [
            handle
            for module in compiled
            for handle in around_compiled(module, self._enter_compiled, self._leave_compiled)
        ]
        try:
            with checkpointing_replaced(self._replace):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._copies.settle()
            self._places.clear()
            self._horizon.begin(passes)

    def enter(self, position: int) -> None:
        """Starts a pass, by its position."""
        self._horizon.enter(position)
        self._fetch_ahead()

    def warn(self) -> None:
        """Says, once, that nothing is checkpointed in the step function."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "offload_activations has an effect only on calls with activation checkpointing "
                "that are not part of a larger compiled call, and step function "
                f"{self._name} has none: mark modules by smp.set_activation_checkpointing, and "
                "compile these or none, or set offload_activations to False.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ checkpointing

    def _replace(self, around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        def new_around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            if self._is_inside or not torch.is_grad_enabled():
                yield from around(function, *args, **kwargs)
                return
            with self._hooks(), self._entered():
                yield from around(self._as_inside(function), *args, **kwargs)

        def new_reentrant(function: Callable[..., Any], *args: Any) -> Any:
            if self._is_inside or not torch.is_grad_enabled():
                return reentrant(function, *args)
            with self._hooks(), self._entered():
                return reentrant(self._as_inside(function), *args)

        return new_around, new_reentrant

    def _enter_compiled(self, module: nn.Module, args: Any) -> None:
        """Takes what a compiled call saves, whose checkpointing is compiled with it."""
        stack = contextlib.ExitStack()
        # First of all: ``_leave_compiled`` is called also when the rest raises.
        self._compiled_calls.append(stack)
        if not self._is_inside and torch.is_grad_enabled():
            stack.enter_context(self._hooks())
            stack.enter_context(self._entered())

    def _leave_compiled(self, module: nn.Module, args: Any, result: Any) -> None:
        self._compiled_calls.pop().close()

    def _hooks(self) -> contextlib.AbstractContextManager[Any]:
        self._region = self._horizon.open()
        self.has_regions = True
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def _is_inside(self) -> bool:
        """Whether this is inside of a region, which will make everything again."""
        return getattr(self._inside, "depth", 0) > 0

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    def _as_inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._entered():
                return function(*args, **kwargs)

        return call

    # ------------------------------------------------------------------ what is saved

    def _pack(self, tensor: torch.Tensor) -> Any:
        packed = self._saving.pack(tensor)
        if not isinstance(packed, Kept) or not self._is_activation(tensor):
            return packed
        assert self._region is not None
        saved = _Saved(self._region, self._meter, self._place(tensor, packed))
        self._region.contents.append(weakref.ref(saved))
        return saved

    def _place(self, tensor: torch.Tensor, kept: Kept) -> _OnDevice | _OnHost:
        """Returns where a tensor is for its backward pass; several regions can be given one."""
        places = self._places  # by identity: tensors that are equal are not one
        version, reference = places.get(tensor, (None, None))  # type: ignore[no-untyped-call]
        place: _OnDevice | _OnHost | None = reference and reference()
        if place is None or version != tensor._version:
            if self._horizon.is_near() or not _is_dense(tensor):
                place = _OnDevice(kept, self._meter)
            else:
                place = _OnHost(self._copies.store(tensor), self._meter)
            places[tensor] = tensor._version, weakref.ref(place)
        return place

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.grad_fn is not None
            and tensor.device == self._device
        )

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return self._saving.unpack(saved)
        self._horizon.use(saved.region)
        if saved.must_come:
            self._meter.memory.num_late += 1
            saved.come(self._copies)
        tensor = saved.get()
        self._fetch_ahead()
        return tensor

    def _fetch_ahead(self) -> None:
        for region in self._horizon.ahead():
            for reference in region.contents:
                saved = reference()
                if saved is not None and saved.must_come:
                    saved.come(self._copies)


class _OnDevice:
    """An activation that stays where it is."""

    def __init__(self, kept: Kept, meter: _Meter) -> None:
        self.kept = kept
        self._meter = meter
        meter.on_device(_num_bytes(kept.tensor))

    def __del__(self) -> None:
        self._meter.on_device(-_num_bytes(self.kept.tensor))


class _OnHost:
    """An activation in host memory, from where it goes with the last graph that needs it."""

    def __init__(self, copy: HostCopy, meter: _Meter) -> None:
        self.copy = copy
        self.num_bytes = _num_bytes(copy.tensor)
        self._meter = meter
        meter.memory.stored_bytes += self.num_bytes
        meter.on_host(self.num_bytes)

    def __del__(self) -> None:
        self._meter.on_host(-self.num_bytes)


class _Saved:
    """What a region saved; autograd holds it as long as it may be asked for.

    Attributes:
        region: which saved it.
    """

    def __init__(
        self, region: Region[weakref.ref[_Saved]], meter: _Meter, place: _OnDevice | _OnHost
    ) -> None:
        self.region = region
        self._place = place
        self._meter = meter
        self._coming: Arrival | None = None
        self._back_bytes = 0

    @property
    def must_come(self) -> bool:
        """Whether it is in host memory only."""
        return isinstance(self._place, _OnHost) and self._coming is None

    def come(self, copies: Copies) -> None:
        """Starts its way back."""
        assert isinstance(self._place, _OnHost)
        self._coming = copies.fetch(self._place.copy)
        self._meter.memory.fetched_bytes += self._place.num_bytes
        # Who computes has it until the region's graph goes; a second copy is another graph's.
        if not self._back_bytes:
            self._back_bytes = self._place.num_bytes
            self._meter.on_device(self._back_bytes)

    def get(self) -> torch.Tensor:
        """Returns it, for the one who computes; asked again, it must come again.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        if isinstance(self._place, _OnDevice):
            return self._place.kept.get()
        if self._place.copy.spoiled is not None:
            raise self._place.copy.spoiled
        assert self._coming is not None
        tensor = self._coming.get()
        self._coming = None
        return tensor

    def __del__(self) -> None:
        self._meter.on_device(-self._back_bytes)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each place of the tensor's memory has one element, so that a copy has its strides."""
    return tensor.layout is torch.strided and (
        torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
