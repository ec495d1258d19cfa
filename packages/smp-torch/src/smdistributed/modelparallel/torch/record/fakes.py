"""Fake stand-ins for a model's parameters and buffers.

Capture runs the user's code on fake tensors: they have shapes, types and devices but no data, so
it costs neither memory nor arithmetic and gives the same graph on every rank, also when the real
parameters are not here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensor,
    FakeTensorMode,
    past_subclass_functions,
)
from smdistributed.modelparallel.torch.record.calls.forward_hooks import ForwardHooks
from smdistributed.modelparallel.torch.record.leaves.gradient_hooks import GradientHooks
from smdistributed.modelparallel.torch.tensor_parallel.module import guard_of
from smdistributed.modelparallel.torch.tensors.spec import attributes_shown, show_attributes

#: (module, name of a parameter or buffer in it)
Slot = tuple[nn.Module, str]


class FakeModel:
    """The fakes of one model.

    Args:
        model: the user's module; its tensors give shapes and types.
        mode: the fake mode that all fakes of a step share.
        device: where the model will run; the fakes say they are there.
        former: of the same model before it was changed: tensors that it knows may have been freed
            since, so its fakes are taken for them.
        number: of the model in this process.

    Attributes:
        names: module -> dotted name, the root's being "".
        slots: every parameter and buffer slot -> its fake; tied slots share one.
        real: id of a real tensor -> its fake, while the fakes are in place.
        behind: slot -> its real tensor, while the fakes are in place.
        whole_shapes: slot of a parameter that is a slice -> the shape of the whole.
        hooks: the user's, on the gradients of its parameters.
        slice_guard: refuses what reads slices of parameters while the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: FakeTensorMode,
        device: torch.device,
        former: FakeModel | None = None,
        number: int = 1,
    ) -> None:
        self.model = model
        self._number = number
        self.names = {module: name for name, module in model.named_modules()}
        self.slice_guard = guard_of(model)
        self.whole_shapes: dict[Slot, tuple[int, ...]] = {
            (each.module, each.attribute): each.shape for each in self.slice_guard.slots
        }
        self._children = {module: list(module._modules.values()) for module in self.names}
        self._parameters = {module: [*module._parameters.keys()] for module in self.names}
        self._tensors: dict[Slot, torch.Tensor] = {}
        self.slots: dict[Slot, torch.Tensor] = {}
        self.real: dict[int, torch.Tensor] = {}
        self.behind: dict[Slot, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        if former is not None:
            made = {
                id(tensor): former.slots[slot]
                for slot, tensor in former._tensors.items()
                if former._has_form(slot, tensor, *_form_of(former.slots[slot]))
            }
        for module, name in self.names.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"TorchScript modules cannot be split; {name or 'the model'} is one. "
                    "Wrap the original nn.Module."
                )
            for slots in (module._parameters, module._buffers):
                for slot, tensor in slots.items():
                    if tensor is None or is_lazy(tensor):
                        continue  # a lazy one has a shape from its first call on
                    if isinstance(tensor, FakeTensor):
                        raise UnsupportedError(
                            f"{f'{name}.{slot}'.lstrip('.')} was made in a forward, while a step "
                            "was recorded, and has no values. Make modules and parameters before "
                            "the model becomes a DistributedModel: run it once on a batch, or call "
                            "what makes them."
                        )
                    if id(tensor) not in made:
                        made[id(tensor)] = _make_fake(tensor, mode, device)
                    self.slots[module, slot] = made[id(tensor)]
                    self._tensors[module, slot] = tensor
        self._first_slots: dict[int, Slot] = {}
        for place, fake in self.slots.items():
            self._first_slots.setdefault(id(fake), place)
        #: How many attributes fakes have that no script has given them.
        self._num_own = [
            len(vars(fake)) - len(attributes_shown(fake)) for fake in self.slots.values()
        ]
        #: Parameters and their forms, and the modules that say what there is now.
        self._forms = [
            (module, slot, tensor, *_form_of(tensor))
            for module in self.names
            for slot, tensor in module._parameters.items()
        ]
        self._buffers = [
            (module._buffers, slot) for module, slot in self._tensors if slot in module._buffers
        ]
        self.hooks: GradientHooks = GradientHooks() if former is None else former.hooks
        self.forward_hooks = ForwardHooks(self.names)
        self.hooks.look(self.named_parameters())

    @property
    def is_current(self) -> bool:
        """Whether the model still has the modules and parameters that it had, of one form.

        Buffers may be bound anew at any time; they go by their slots.
        """
        for module, children in self._children.items():
            if list(module._modules.values()) != children:
                return False
            if list(module._parameters) != self._parameters[module]:
                return False
        if not all(slot in table for table, slot in self._buffers):
            return False
        with past_subclass_functions():
            for module, slot, tensor, dtype, shape in self._forms:
                if module._parameters.get(slot) is not tensor:
                    return False
                if tensor is None or (tensor.dtype is dtype and tensor.shape == shape):
                    continue
                if not self._has_form((module, slot), tensor, dtype, shape):
                    return False
        return True

    def _has_form(self, slot: Slot, tensor: torch.Tensor, dtype: Any, shape: Any) -> bool:
        """Whether a tensor is what it was.

        One that another rank has may have been freed since, and shows the whole of a slice.
        """
        if tensor.dtype is not dtype:
            return False
        return tensor.shape == shape or not tensor.numel() or tensor.shape == self._whole(slot)

    def _whole(self, slot: Slot) -> torch.Size | None:
        return torch.Size(self.whole_shapes[slot]) if slot in self.whole_shapes else None

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Returns the parameters, wherever their values are, by name; tied ones once."""
        found = {
            id(tensor): (self.slot_name(slot), tensor)
            for slot, tensor in reversed(self._tensors.items())
            if slot[1] in slot[0]._parameters
        }
        return dict(reversed(found.values()))

    def check_current(self) -> None:
        """Makes sure that the first forward has not changed the model where one rank alone is.

        Raises:
            UnsupportedError: it has.
        """
        if not self.is_current:
            changed = next(
                (
                    name
                    for module, name in self.names.items()
                    if list(module._modules.values()) != self._children[module]
                ),
                "",
            )
            raise UnsupportedError(
                f"the first forward replaces modules or parameters of {changed or 'the model'} "
                "inside a module that stays whole on one partition; other ranks would not know. "
                "Make that change before the model becomes a DistributedModel: run it once on a "
                "batch like those to come, or call what makes the change."
            )

    def flags(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Returns whether each module trains and each parameter and buffer requires a gradient."""
        return (
            tuple([module.training for module in self.names]),
            tuple([tensor.requires_grad for tensor in self._tensors.values()]),
        )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the fakes into the modules, and the real tensors back afterwards."""
        real = []
        self.real, self.behind = {}, {}
        slots = zip(self.slots.items(), self._num_own, strict=True)
        for ((module, slot), fake), num_own in slots:
            tensors = _tensors_of(module, slot)
            tensor = tensors[slot]
            assert tensor is not None
            given: dict[str, Any] = {}
            self.real[id(tensor)] = fake
            self.behind[module, slot] = tensor
            if fake.requires_grad is not tensor.requires_grad:
                fake.requires_grad_(tensor.requires_grad)
            tensors[slot] = fake
            if vars(tensor) or len(vars(fake)) != num_own:
                given = attributes_shown(tensor)
                show_attributes(fake, given)
            real.append((tensors, slot, tensor, fake, num_own, given))
        self.slice_guard.behind = self.behind
        try:
            yield
        finally:
            for tensors, slot, tensor, fake, num_own, given in real:
                if given or len(vars(fake)) != num_own:
                    _follow(tensor, given, attributes_shown(fake))
                tensors[slot] = tensor
            self.real, self.behind = {}, {}
            self.slice_guard.behind = {}

    @contextlib.contextmanager
    def real_in_place(self) -> Iterator[None]:
        """Puts the real tensors back for a while, inside ``in_place``."""
        fakes = []
        behind, self.slice_guard.behind = self.behind, {}
        for (module, slot), tensor in behind.items():
            tensors = _tensors_of(module, slot)
            fakes.append((tensors, slot, tensors[slot]))
            tensors[slot] = tensor
        try:
            yield
        finally:
            for tensors, slot, fake in fakes:
                tensors[slot] = fake
            self.slice_guard.behind = behind

    def rebound(self) -> Iterator[Slot]:
        """Yields the parameters and buffers that code has assigned new tensors to; in place."""
        for slot, fake in self.slots.items():
            if _tensors_of(*slot).get(slot[1]) is not fake:
                yield slot

    def draw_name(self, module: nn.Module) -> str:
        """Returns the name of a module in the keys of random numbers."""
        return f"{self._number}:{self.names[module]}"

    def first_slot(self, slot: Slot) -> Slot:
        """Returns the first of the slots that have a parameter or buffer, which may be tied."""
        return self._first_slots[id(self.slots[slot])]

    def slot_name(self, slot: Slot) -> str:
        """Returns the dotted name of a parameter or buffer."""
        module, name = slot
        return f"{self.names[module]}.{name}" if self.names[module] else name


def _tensors_of(module: nn.Module, slot: str) -> dict[str, torch.Tensor | None]:
    return module._parameters if slot in module._parameters else module._buffers  # type: ignore[return-value]


def _follow(tensor: torch.Tensor, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Changes attributes of a tensor as those of its fake were; others change them meanwhile."""
    for name in before.keys() - now.keys():
        vars(tensor).pop(name, None)
    for name, value in now.items():
        if name not in before or before[name] is not value:
            vars(tensor)[name] = value


def _make_fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def _form_of(tensor: torch.Tensor | None) -> tuple[torch.dtype | None, torch.Size | None]:
    is_there = tensor is not None and not is_lazy(tensor)
    return (tensor.dtype, tensor.shape) if is_there else (None, None)  # type: ignore[union-attr]
