"""Between steps parameters in slices stand for the whole ones, as those in shards do.

``parts.at_rest`` brings slices together for each function of torch, and has each rank keep its own
of what was written to. Code of this library uses slices as they are, and so does an optimizer that
works number by number: nothing is gathered for an update.

``tensor.as_subclass(torch.Tensor)`` gives who wants it the slice.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.following import (
    computed_gradient,
    is_computed_for,
    note_given,
)
from smdistributed.modelparallel.torch.absence.notes import REMEDY
from smdistributed.modelparallel.torch.absence.owned import (
    gradient_of,
    is_owned,
    of_copy,
    own_up,
    with_data,
)
from smdistributed.modelparallel.torch.absence.tensors import is_vacant
from smdistributed.modelparallel.torch.compat.calling_line import is_called_by_library
from smdistributed.modelparallel.torch.compat.private import below
from smdistributed.modelparallel.torch.compat.private.backward import when_backward_ends
from smdistributed.modelparallel.torch.compat.private.modes import (
    inside_transform,
    past_subclass_functions,
)
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.parts import at_rest
from smdistributed.modelparallel.torch.parts.assigning import blocks_of_given
from smdistributed.modelparallel.torch.parts.at_rest import (
    InParts,
    Lying,
    PartView,
    as_they_are,
    changing_memory,
    hide,
    hide_within,
    in_parts,
    run,
    show,
    show_within,
)
from smdistributed.modelparallel.torch.parts.blocks import Blocks, put, taken
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import SliceGuard, SliceSlot
from smdistributed.modelparallel.torch.tensor_parallel.words import Moment

#: What brings a function of torch here.
_MECHANISM = frozenset((__name__, below.__name__, at_rest.__name__))
_Tensor: Any = torch.Tensor
_GRADIENT: Any = _Tensor.grad
_DATA: Any = _Tensor.data


class SliceAtRest(PartView):
    """The class of slices between steps; for ``isinstance`` parameters stay such."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got a slice, or what sees the memory of the whole."""
        kwargs = kwargs or {}
        if (slices := _of_library(args, kwargs)) is not None:
            with past_subclass_functions(), _as_slices(slices):
                return func(*args, **kwargs)
        own: Any = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and func == _DATA.__set__ and _is_held(own):
            return None if args[1] is own else _take_data(own, args[1])
        if own is not None and not own.lying.is_view and isinstance(own, nn.Parameter):
            if func == _GRADIENT.__set__ and args[1] is not None:
                return _take_gradient(own, args[1])
            if func == _GRADIENT.__delete__ or func == _GRADIENT.__set__:
                with past_subclass_functions():
                    return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that came past ``__torch_function__``; see ``compat.private.below``."""
        if (slices := _of_library(args, kwargs)) is not None:
            with past_subclass_functions(), _as_slices(slices):
                return func(*args, **kwargs)
        return super().operate(func, args, kwargs)

    def take_data(self, tensor: torch.Tensor) -> None:
        """See ``InParts``."""
        _take_data(self, tensor)

    def take_gradient(self, tensor: torch.Tensor | None) -> None:
        """See ``InParts``."""
        if tensor is not None:
            _take_gradient(self, tensor)
            return
        with past_subclass_functions():
            self.grad = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says whose slice it is, and its numbers: nobody else is asked."""
        lying = self.lying
        if not lying.is_all:
            return super().__repr__()
        return f"slice of {lying.blocks.told}: {lying.blocks.values.detach()!r}"

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, it is the slice."""
        with past_subclass_functions(), _as_slices([self]):
            yield

    def as_subclass(self, cls: Any) -> Any:
        """Returns the slice itself, as another class."""
        lying = self.lying
        own = lying.blocks.values.detach() if lying.is_all else self.clone().detach()
        return own.requires_grad_(self.requires_grad).as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is written as the whole, a tensor as any other. Collective: TP_GROUP."""
        return self._copied().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        """Is copied with its class."""
        return self._with(self.lying.blocks)

    def __deepcopy__(self, memo: Any) -> Any:
        """Is copied with its class: a module that has it runs on slices."""
        if id(self) not in memo:
            blocks = self.lying.blocks
            copied = blocks.values.detach().clone()
            is_all = self.lying.is_all
            memo[id(self)] = (
                self._with(blocks.like_these(copied, is_gradient=blocks.is_gradient))
                if is_all
                else self._copied()
            )
            if (about := of_copy(self)) is not None:
                own_up(memo[id(self)], about)
        return memo[id(self)]

    def _copied(self) -> Any:
        copied = self.detach().clone()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(copied, self.requires_grad)
        return copied

    def _with(self, blocks: Blocks) -> Any:
        made: Any = torch.empty(0, dtype=blocks.values.dtype, device=blocks.values.device)
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        hide(made, type(self), self.lying._replace(blocks=blocks))
        return made


class SlicesAtRest:
    """The slices of one model on this rank, between steps.

    Args:
        group: the ranks that have the others.
        rests: tells whether it is between two steps.
    """

    def __init__(self, group: TensorGroup, rests: Callable[[], bool]) -> None:
        self._group = group
        self._rests = rests
        self.held = "each tensor-parallel rank has a slice"
        self.view_class: type[torch.Tensor] = SliceAtRest
        self.when = ""
        self._blocks: dict[str, Blocks] = {}
        #: What was awake besides: a script may have it in hand.
        self._woken: list[tuple[weakref.ref[torch.Tensor], Lying]] = []
        self._slots: Sequence[tuple[torch.Tensor, SliceSlot]] = ()
        self._are_resting = False
        if group.passes is not None:
            group.passes.resting.add(self)

    def rest(self, slices: Iterable[tuple[torch.Tensor, SliceSlot]]) -> None:
        """Has parameters that are slices, and their gradients, stand for the whole."""
        self._slots = list(slices)
        self._are_resting = bool(self._slots)
        with changing_memory():
            for tensor, slot in self._slots:
                if type(tensor) is nn.Parameter and not tensor.is_meta:
                    gradient = tensor.grad
                    self._hide(tensor, slot)
                    if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                        blocks = self._blocks[slot.name]
                        values = blocks.like_these(gradient.detach(), is_gradient=True)
                        hide_within(gradient, SliceAtRest, Lying.all_of(values))
        for woken, lying in self._woken:
            each = woken()
            if each is not None and not isinstance(each, InParts):
                hide(each, SliceAtRest, lying)
        self._woken.clear()

    def wake(self) -> bool:
        """Gives parameters, and gradients, back what they are; returns whether some rested."""
        rested = self._are_resting = False
        with changing_memory():
            for tensor, _ in self._slots:
                gradient = tensor.grad
                for each in (tensor, gradient):
                    if isinstance(each, SliceAtRest):
                        rested, lying = True, each.lying
                        show_within(each, lying.blocks.values)
                        if each is gradient:
                            self._woken.append((weakref.ref(each), lying))
        return rested

    def follow(self, model: nn.Module, guard: SliceGuard) -> None:
        """Cuts whole parameters that a script has put where slices were; all ranks have the same.

        Raises:
            UnsupportedError: something else is in the place of a slice.
        """
        modules = set(model.modules())
        for slot in guard.slots:
            if slot.module in modules and slot.attribute not in slot.module._parameters:
                raise UnsupportedError(
                    f"{slot.name}, of which {self.held}, is no parameter of its module any more, "
                    "as after pruning or a parametrization: do that before smp.DistributedModel, "
                    "and keep the module whole, by smp.set_tensor_parallelism(module, "
                    "enabled=False)."
                )
        for tensor, slot in guard.tensors():
            if type(tensor) is nn.Parameter and tensor.shape == slot.shape and not tensor.is_meta:
                part = slot.parts[self._group.rank]
                for each in (tensor, tensor.grad):
                    if each is not None:
                        each.data = taken(each.detach(), part).contiguous()

    def _hide(self, tensor: torch.Tensor, slot: SliceSlot) -> None:
        known = self._blocks.get(slot.name)
        values = tensor.detach()  # a write counts as one to the parameter
        if known is None or not known.is_here or not _is_same(known.values, values):
            part = slot.parts[self._group.rank]
            known = Blocks(slot.name, torch.Size(slot.shape), part, values, self, slot)
            self._blocks[slot.name] = known
        hide_within(tensor, SliceAtRest, Lying.all_of(known))

    # ------------------------------------------------------------------ a home of blocks

    def is_at_rest(self, blocks: Blocks) -> bool:
        """See ``Home``."""
        return self._rests()

    def prepare(self) -> None:
        """See ``Home``; gradients come to slices by ``differentiable``."""

    def differentiable(self, tensor: Any, whole: torch.Tensor) -> torch.Tensor | None:
        """See ``Home``: of the whole of a parameter autograd gives the slice the gradient."""
        is_asked = torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf
        if not is_asked or tensor.lying.is_view:
            return None
        blocks = tensor.lying.blocks
        if inside_transform():  # whose own graph alone is differentiated
            return whole
        with past_subclass_functions(), _as_slices([tensor]):
            found: torch.Tensor = _Gathered.apply(tensor, whole, blocks)  # type: ignore[no-untyped-call]
        return found

    def differentiated(self, tensor: Any, gradient: torch.Tensor) -> torch.Tensor:
        """See ``Home``: it is a slice as that of the parameter.

        Raises:
            UnsupportedError: it has a graph, which is that of the slice.
        """
        blocks: Blocks = tensor.lying.blocks
        if tensor.lying.is_view:
            return gradient
        if gradient.requires_grad:
            raise UnsupportedError(
                f"a gradient with create_graph=True was asked for by {blocks.told_of_ranks}, and "
                "the others of it are no part of the graph: differentiate by what "
                "parameter.detach().clone().requires_grad_() returns, which has all of it."
            )
        if gradient.shape == blocks.values.shape:
            values = blocks.like_these(gradient.detach(), is_gradient=True)
            hide(gradient, SliceAtRest, Lying.all_of(values))
        return gradient

    def agree(self, blocks: Blocks) -> None:
        """See ``Home``."""
        assert self._group.words is not None
        number = zlib.crc32(blocks.told.encode())
        everyones = self._group.words.say(Moment.WHOLE, blocks.told, [number])
        if any(each[0] != number for each in everyones):
            self._group.refuse(
                "must use the parameters of a model in the same order between steps, since they "
                "gather them together",
                f"use of {blocks.told}",
            )

    def gather(self, blocks: Blocks) -> torch.Tensor:
        """See ``Home``."""
        self.agree(blocks)
        slot: Any = blocks.key
        values = blocks.values.detach()
        sizes = [1] * self._group.size
        found = self._group.collectives.gather(values.contiguous()[None], sizes)
        whole = values.new_empty(blocks.shape)
        for part, each in zip(slot.parts, found, strict=True):
            put(whole, part, each)
        return whole

    def updated(self) -> None:
        """See ``Home``; who goes by what parameters were looks at their versions."""

    def wake_in_this_pass(self) -> None:
        """Has a backward pass use slices, and add to their gradients; then they rest again."""
        if self._are_resting:
            self.wake()
            when_backward_ends(functools.partial(self.rest, self._slots))


class _Gathered(torch.autograd.Function):
    """The whole of a slice: its gradient is the slice of that of the whole."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, whole: torch.Tensor, blocks: Blocks) -> Any:
        ctx.blocks = blocks
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        home: Any = ctx.blocks.home
        home.wake_in_this_pass()
        return ctx.blocks.of_this_rank(gradient).contiguous(), None, None


def _take_data(own: Any, tensor: Any) -> None:
    """Has a tensor that a script gives be the data of a parameter, or of its gradient.

    It may have another type, or be elsewhere. Collective: TP_GROUP.

    Raises:
        UnsupportedError: one other partition has it.
    """
    former: Blocks = own.lying.blocks
    if is_vacant(tensor):
        with past_subclass_functions():  # by the shape of the whole
            is_computed = is_computed_for(own, tensor)
        if is_computed:
            with torch.no_grad():
                run(_Tensor.copy_, (own, tensor), {})
            note_given(tensor)
            return
        raise UnsupportedError(
            f"{former.told} is given as its data what another partition has, or what was computed "
            f"from it. {REMEDY}"
        )
    former.home.agree(former)
    about = with_data(own, tensor) if is_owned(own) else None
    with as_they_are():
        form = former.values.new_empty(0, dtype=tensor.dtype, device=tensor.device)
        is_alike = (form.dtype, form.device) == (former.values.dtype, former.values.device)
        like = former if is_alike else former.like_these(form, is_gradient=former.is_gradient)
        blocks = blocks_of_given(tensor, like, tensor.dtype)
        if not is_alike:
            hide(own, SliceAtRest, Lying.all_of(blocks))
        elif blocks is not former:
            kept, former.values = former.values, former.values.clone()
            kept.copy_(blocks.values)
            blocks.values = kept
            own.lying = Lying.all_of(blocks)
    if about is not None:
        own.owned = about


def _is_held(own: Any) -> bool:
    """Whether a tensor is a parameter or its gradient, and no view of one."""
    lying: Lying = own.lying
    if isinstance(own, nn.Parameter):
        return not lying.is_view
    slot: Any = lying.blocks.key
    with past_subclass_functions():
        parameter = slot.module._parameters.get(slot.attribute)
        return parameter is not None and own is parameter.grad


def _take_gradient(own: Any, tensor: Any) -> None:
    """Has a tensor that a script gives be the gradient of a parameter. Collective: TP_GROUP."""
    with past_subclass_functions():
        if tensor is own.grad:
            return
        if is_vacant(tensor) and is_computed_for(own, tensor):
            tensor = computed_gradient(tensor)
    blocks: Blocks = own.lying.blocks
    like = blocks.like_these(blocks.values.new_empty(0), is_gradient=True)
    like.home.agree(like)
    with as_they_are():
        blocks_of_given(tensor, like, blocks.values.dtype)
    with past_subclass_functions():
        _GRADIENT.__set__(own, tensor)
    gradient_of(own)  # it is as others know of it from now on


@contextlib.contextmanager
def _as_slices(slices: Iterable[Any]) -> Iterator[None]:
    """Inside, what stands for whole tensors is what this rank has of them."""
    shown = [(each, each.lying) for each in slices]
    for each, lying in shown:
        show(each, lying.blocks.values)
    try:
        yield
    finally:
        for each, lying in shown:
            if not isinstance(each, InParts):
                if not _is_same(each, lying.blocks.values):
                    lying.blocks.values = each.detach()
                hide(each, SliceAtRest, lying)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors see the same memory alike."""
    return (
        storage_of(one) == storage_of(other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as any other of all numbers. Collective, if ranks have slices: TP_GROUP."""
    return run(_Tensor.clone, (tensor,), {}) if isinstance(tensor, SliceAtRest) else tensor


def _of_library(args: Any, kwargs: Any) -> list[Any] | None:
    """Returns the slices in arguments, if code of this library calls, which uses them as such."""
    if not is_called_by_library(_MECHANISM):
        return None
    slices = [each for each in in_parts((args, kwargs)) if isinstance(each, SliceAtRest)]
    return slices if all(each.lying.is_all for each in slices) else None
