"""Between steps a tensor in parts stands for the whole one, since all ranks run the same Python.

Parts are shards, or slices of tensor parallelism. For each function of torch what it gets is
gathered, one tensor after the other, and is a tensor as any other while the function runs. Then
each rank keeps its own block of what has been written to, and the rest goes. What sees the memory
of a whole tensor, such as ``.data`` or a row, stays a view: it knows where it lies in the whole,
and reads and writes that.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.owned import (
    OwnedTensor,
    follow,
    gradient_of,
    is_owned,
    note_call,
    note_gradients,
    own_up,
    owned_in,
)
from smdistributed.modelparallel.torch.absence.set_data import set_data
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor
from smdistributed.modelparallel.torch.compat.private.below import (
    operated_by,
    past_operations,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    is_traced,
    is_wrapped,
    past_subclass_functions,
    past_watchers,
)
from smdistributed.modelparallel.torch.compat.private.tensors import (
    storage_of,
    version_of,
)
from smdistributed.modelparallel.torch.parts.arguments import (
    is_identity,
    leaves_of,
    name_of,
)
from smdistributed.modelparallel.torch.parts.blocks import Blocks
from smdistributed.modelparallel.torch.tensors.foreach import is_foreach, one_by_one
from smdistributed.modelparallel.torch.tensors.functions import (
    ABOUT,
    BY_NUMBER,
    CONVERSIONS,
    DIFFERENTIATING,
    GIVING_MEMORY,
    OF_OBJECTS,
    SWITCHING_GRADIENTS,
)
from smdistributed.modelparallel.torch.tensors.written import WritesCounted

_TENSOR: Any = torch.Tensor
#: What concerns the object, and not its values.
ABOUT_PARTS = ABOUT | OF_OBJECTS | SWITCHING_GRADIENTS | {_TENSOR.register_hook}
#: What would give away the memory of the whole, which goes; pickled is the whole.
_MEMORY = GIVING_MEMORY - {_TENSOR.__reduce_ex__}
_GRAD: Any = _TENSOR.grad
_DATA: Any = _TENSOR.data


class Lying(NamedTuple):
    """How a tensor lies in a whole one.

    Attributes:
        blocks: what ranks have of the whole.
        size: of the tensor.
        stride: of the tensor.
        offset: of its first number.
        dtype: as which it sees the memory.
        is_view: it is not what ranks have parts of, but sees that: to autograd it is another one.
    """

    blocks: Blocks
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_view: bool = False

    @classmethod
    def all_of(cls, blocks: Blocks) -> Lying:
        """Returns how the whole lies in itself."""
        size = tuple(blocks.shape)
        stride = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
        return cls(blocks, size, stride, 0, blocks.values.dtype)

    @property
    def is_all(self) -> bool:
        """Whether it is the whole, or sees all of it in the same form."""
        return self._replace(is_view=False) == Lying.all_of(self.blocks)

    def seen_in(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, in the memory of the whole."""
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), self.offset, self.size, self.stride)

    def of(self, tensor: torch.Tensor) -> Lying:
        """Returns how a tensor lies in the same whole."""
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return Lying(self.blocks, *place, tensor.dtype, self.is_view)


class InParts:
    """What stands for a whole tensor of which each rank of a group has a block.

    Attributes:
        lying: in the whole.
    """

    lying: Any = None

    def take_data(self, tensor: torch.Tensor) -> None:
        """Has a parameter be another whole tensor. Collective: the group."""
        raise NotImplementedError

    def take_gradient(self, tensor: torch.Tensor | None) -> None:
        """Has a parameter have another whole gradient, or none. Collective: the group."""
        raise NotImplementedError


class PartView(torch.Tensor, InParts):
    """What sees the memory of a parameter in parts, or of its gradient; the gradient, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got such a view."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None:
            lying = own.lying
            with past_subclass_functions():
                if func == _GRAD.__get__:
                    return gradient_of(own)
                if func in ABOUT_PARTS:
                    return func(*args, **kwargs)
                if func in CONVERSIONS and lying.is_all and is_identity(func, args, kwargs):
                    return own
            is_number_by_number = func in BY_NUMBER and _are_numbers((args[1:], kwargs))
            if is_number_by_number and lying.blocks.is_gradient and lying.is_all:
                func(lying.blocks.values, *args[1:], **kwargs)
                note_call(func, args, kwargs)
                return own
        return run(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that came past ``__torch_function__``; see ``compat.private.below``."""
        return run(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is; its values are on several ranks."""
        lying = self.lying
        return f"{type(self).__name__}({lying.blocks.told}, shape={tuple(lying.size)})"


def whole_of(blocks: Blocks) -> PartView:
    """Returns what stands for the whole of what ranks have in blocks."""
    made: Any = torch.empty(0, dtype=blocks.values.dtype, device=blocks.values.device)
    hide(made, blocks.home.view_class, Lying.all_of(blocks))
    return made  # type: ignore[no-any-return]


def hide(tensor: torch.Tensor, kind: type[Any], lying: Lying) -> None:
    """Takes the memory of a whole tensor away; what it was part of is in parts."""
    with changing_memory():
        hide_within(tensor, kind, lying)
    lying.blocks.note_seen_by(tensor)


def show(tensor: Any, data: torch.Tensor) -> None:
    """Gives a tensor memory: it is as any other."""
    with changing_memory():
        show_within(tensor, data)


@contextlib.contextmanager
def changing_memory() -> Iterator[None]:
    """Inside, tensors are given memory, or lose it: many at once cost less than each by itself."""
    with as_they_are(), past_operations():
        yield


def hide_within(tensor: torch.Tensor, kind: type[Any], lying: Lying) -> None:
    """Does what ``hide`` does, inside ``changing_memory``."""
    own: Any = tensor
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.data = _vacant(lying.size, lying.dtype, tensor.device, kind, lying.stride)
    own.__class__ = kind
    if issubclass(kind, PartView):
        own.lying = lying
        if is_parameter:
            own._is_param = True


def show_within(tensor: Any, data: torch.Tensor) -> None:
    """Does what ``show`` does, inside ``changing_memory``."""
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.data = data
    tensor.__class__ = nn.Parameter if is_parameter else torch.Tensor
    for each in ("lying", "_is_param"):
        vars(tensor).pop(each, None)


@contextlib.contextmanager
def as_they_are() -> Iterator[None]:
    """Inside, no class of tensors takes part, and what is made is as made outside of all modes."""
    with past_watchers(), past_subclass_functions(), torch.inference_mode(False), torch.no_grad():
        yield


#: What has no memory of a form, which tensors share.
_vacant: Any = functools.lru_cache(maxsize=1024)(without_memory)


def in_parts(structure: Any) -> list[Any]:
    """Returns what stands for whole tensors in arguments, each once."""
    found = {id(each): each for each in leaves_of(structure) if isinstance(each, InParts)}
    return list(found.values())


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of torch, or an operation, with whole tensors. Collective: their groups.

    Raises:
        UnsupportedError: it is no time for it, or the ranks could not keep what comes of it.
    """
    given = in_parts((args, kwargs))
    if not given:
        raise UnsupportedError(
            f"{name_of(func)} got a tensor that was given the data of one of which ranks have "
            "parts: give it what clone() returns, or write by copy_."
        )
    for each in given:
        _check_rests(each.lying.blocks, func)
    if func in DIFFERENTIATING:
        return _differentiate(func, args, kwargs)
    if func in _MEMORY:
        raise _refusal(
            func,
            given[0].lying.blocks,
            "asks for the memory of",
            " A file is to be written of state_dict() of the DistributedModel, or by "
            "save_pretrained(folder) of the model itself: every rank calls either.",
        )
    if is_traced():
        raise _refusal(func, given[0].lying.blocks, "runs in torch.jit.trace, with")
    if func is _TENSOR.__iter__:
        return iter(run(_TENSOR.unbind, args, kwargs))
    if is_foreach(func):
        return one_by_one(functools.partial(_with_one, func), args, kwargs)
    with Shown(given) as shown:
        result = shown.call(func, args, kwargs)
        views = shown.views_in(func, (args, kwargs), result)
    shown.keep()
    for view, lying in views:
        hide(view, lying.blocks.home.view_class, lying)
    return result


def _check_rests(blocks: Blocks, func: Any) -> None:
    if not blocks.is_here:
        raise UnsupportedError(
            f"{name_of(func)} asks for {blocks.told_of_ranks}, all of them on another partition "
            "now: look at parameters themselves after the first call of a step function, not at "
            "what saw them before. Values of all partitions: state_dict() of the DistributedModel."
        )
    if not blocks.home.is_at_rest(blocks):
        raise UnsupportedError(
            f"{name_of(func)} asks for {blocks.told_of_ranks}. They come together between steps"
            f"{blocks.home.when}, and not for a backward pass: inside of a step use the parameters "
            "of the model, compute what is differentiated with what clone() of them returns, and "
            "for norms use smp.clip_grad_norm_ or torch.nn.utils.get_total_norm between steps."
        )


def _refusal(func: Any, blocks: Blocks, what: str, more: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"{name_of(func)} {what} {blocks.told_of_ranks}, so that a whole one is there for as long "
        f"as a function of torch runs: take what clone() returns, and write by copy_.{more}"
    )


def _differentiate(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a backward pass; returns gradients as a script sees them."""
    with past_subclass_functions():
        result = func(*args, **kwargs)
    if func is not torch.autograd.grad:
        return result
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    found = tuple(
        each.lying.blocks.home.differentiated(each, gradient)
        if isinstance(each, InParts) and gradient is not None
        else gradient
        for each, gradient in zip(inputs, result, strict=True)
    )
    note_gradients(func, args, kwargs, found)
    return found


def _with_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of many tensors on one, so that one at a time is whole."""
    with Shown(in_parts((args, kwargs))) as shown:
        result = shown.call(func, args, kwargs)
    shown.keep()
    return result


class Shown:
    """Gathers tensors that are as any others inside. Collective: the sharding groups.

    Args:
        given: what stands for them.

    Attributes:
        wholes: what has been gathered.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = [(each, type(each), each.lying) for each in given]
        self._all = {id(each): each for each in given}
        self.wholes: dict[Blocks, torch.Tensor] = {}
        #: What autograd knows as the whole of a tensor, by the number of that.
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []
        self._written: set[Blocks] = set()

    def __enter__(self) -> Shown:
        for _, _, lying in self._given:
            blocks = lying.blocks
            if blocks not in self.wholes:
                blocks.home.prepare()
                with as_they_are():
                    self.wholes[blocks] = blocks.home.gather(blocks)
        for each, _, lying in self._given:
            whole = self.wholes[lying.blocks]
            stand_in = lying.blocks.home.differentiable(each, whole)
            if stand_in is None:
                with as_they_are():
                    data = lying.seen_in(whole)
                show(each, data)
            else:
                self._stand_ins[id(each)] = stand_in
                if is_owned(each):
                    own_up(stand_in, each.owned)
        self._given = [one for one in self._given if id(one[0]) not in self._stand_ins]
        self._versions = [version_of(each) for each, _, _ in self._given]
        return self

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function with the whole tensors; returns what it does of those given."""
        owned = {id(each) for each, *_ in self._given if is_owned(each)}
        try:
            with WritesCounted():
                return self._call(func, args, kwargs)
        finally:
            for each, _, lying in self._given:
                is_owned_now = is_owned(each) and id(each) not in owned
                if isinstance(each, AbsentTensor) or is_owned_now:
                    _write_to_others(each, lying)
            for blocks, whole in [*self.wholes.items()]:
                if operated_by(whole) is not None:  # another partition has what was written to it
                    blocks.let_go()
                    del self.wholes[blocks]

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._stand_ins:
            return _followed(func, args, kwargs)
        result = _followed(func, self._replaced(args), self._replaced(kwargs))
        for number, stand_in in self._stand_ins.items():
            if result is stand_in:
                return self._all[number]
        return result

    def _replaced(self, structure: Any) -> Any:
        """Returns arguments with what autograd knows as the whole of some of them."""
        if isinstance(structure, dict):
            return {key: self._replaced(value) for key, value in structure.items()}
        if type(structure) in (list, tuple):
            return type(structure)(map(self._replaced, structure))
        return self._stand_ins.get(id(structure), structure)

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        moved = None
        for (each, kind, lying), version in zip(self._given, self._versions, strict=True):
            if lying.blocks not in self.wholes:
                continue
            if version_of(each) != version:
                self._written.add(lying.blocks)
            now = lying.of(each)
            whole = self.wholes[lying.blocks]
            size = each.untyped_storage().nbytes()
            stays = storage_of(each) == storage_of(whole) and size == whole.nbytes
            if not stays or (now != lying and not issubclass(kind, PartView)):
                moved, now = lying.blocks, lying
            hide(each, kind, now)
        if moved is not None and failed is None:
            raise UnsupportedError(
                f"{moved.told} would get another form, or other memory, and {moved.home.held} of "
                "the one that it has: write what has its shape and type by copy_, and give "
                "parameters data and gradients themselves."
            )

    def take_back(self) -> list[tuple[Any, torch.Tensor]]:
        """Returns the tensors that have been given other memory, with that; they lose it."""
        moved = []
        for each, _, lying in self._given:
            whole = self.wholes[lying.blocks]
            if storage_of(each) != storage_of(whole):
                moved.append((each, each.detach()))
                with as_they_are():
                    show(each, lying.seen_in(whole))
        return moved

    def keep(self) -> None:
        """Has each rank keep its own block of what has been written to."""
        for blocks, whole in self.wholes.items():
            with as_they_are():
                is_other = blocks.keep(whole)
            if (is_other or blocks in self._written) and not blocks.is_gradient:
                blocks.home.updated()

    def views_in(self, func: Any, arguments: Any, result: Any) -> list[tuple[torch.Tensor, Lying]]:
        """Returns the tensors in a result that see a whole one, and how they lie in it.

        Raises:
            UnsupportedError: something else would see it.
        """
        if isinstance(result, np.ndarray):
            result.setflags(write=False)  # what is written there no rank would see
        whole_at = {storage_of(whole): blocks for blocks, whole in self.wholes.items()}
        own = self._all.keys()
        found = []
        for each in _tensors_in(result, own):
            blocks = whole_at.get(storage_of(each))
            if blocks is None:
                continue
            is_torchs = type(each) in (torch.Tensor, nn.Parameter, OwnedTensor)
            with past_subclass_functions():
                is_lazy = each.is_conj() or each.is_neg()
            if not is_torchs or is_lazy:
                raise _refusal(func, blocks, "would let something else see the memory of")
            found.append((each, Lying.all_of(blocks)._replace(is_view=True).of(each)))
        for each in _tensors_in(arguments, own):
            if storage_of(each) in whole_at and all(each is not view for view, _ in found):
                blocks = whole_at[storage_of(each)]
                raise _refusal(func, blocks, "would let another tensor see the memory of")
        return found


def _write_to_others(tensor: Any, lying: Lying) -> None:
    """Has what sees the same whole as a tensor be of the partition whose values that was given.

    Args:
        tensor: absent, or owned, since a call.
        lying: in the whole, before that.
    """
    if not lying.is_all:
        return
    for each in lying.blocks.seen_by:
        other: Any = each
        is_same = isinstance(other, InParts) and other.lying.blocks is lying.blocks
        if other is tensor or not is_same or not other.lying.is_all:
            continue
        if isinstance(tensor, AbsentTensor):
            show(other, lying.blocks.values)
            set_data(other, tensor, tensor.absent.origin)
        else:
            own_up(other, tensor.owned)


def _followed(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function with whole tensors; what they are owned by is known of its results."""
    if owned_in((args, kwargs)) and not _has_others((args, kwargs)):
        return follow(func, args, kwargs)
    return func(*args, **kwargs)


def _has_others(structure: Any) -> bool:
    """Whether tensors know by themselves what is to be done, as those of other partitions."""
    return any(hasattr(type(each), "operate") for each in leaves_of(structure))


def _tensors_in(structure: Any, without: Collection[int]) -> Iterator[torch.Tensor]:
    """Yields tensors with memory in a structure, but for some."""
    if isinstance(structure, torch.Tensor):
        has_memory = not is_wrapped(structure) and operated_by(structure) is None
        if id(structure) not in without and has_memory:
            with past_subclass_functions():
                if structure.layout is torch.strided:
                    yield structure
    elif isinstance(structure, dict):
        yield from _tensors_in(list(structure.values()), without)
    elif isinstance(structure, list | tuple):
        for each in structure:
            yield from _tensors_in(each, without)


def _are_numbers(structure: Any) -> bool:
    """Whether the tensors in arguments are numbers, which are what they are of any block."""
    leaves = (each for each in leaves_of(structure) if isinstance(each, torch.Tensor))
    return all(each.dim() == 0 and not isinstance(each, InParts) for each in leaves)
