"""A tensor whose values this rank alone of its pipeline has: the other side of an absent one.

Between two steps a parameter of the own partition, its gradient and what a script computes from
them are owned. They have memory and are used as any other tensor; they know whose they are. Where
Python reads a value, this rank leaves it for the ranks that lack it (``runtime.published``), where
the same script runs. Inside of steps, and for code of this library, they are tensors of torch.
Tensors in parts (``parts``), of which the ranks of one partition have slices, are owned, too, and
keep their class: ``parts.at_rest`` follows what is done with the whole of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.torch.absence.digests import digest_of, place_of
from smdistributed.modelparallel.torch.absence.notes import (
    Origin,
    check_forms,
    check_not_traced,
    name_of,
    not_differentiated,
    shortened,
)
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.compat.private.modes import (
    inside_transform,
    is_wrapped,
    past_subclass_functions,
    pytree,
)
from smdistributed.modelparallel.torch.compat.private.tensors import LikeTensor, version_of
from smdistributed.modelparallel.torch.tensors.foreach import is_foreach, one_by_one
from smdistributed.modelparallel.torch.tensors.functions import (
    ABOUT,
    BACKWARD,
    GIVING_VALUES,
    HOOKING_GRADIENTS,
    MAKING_LIKE,
    OF_OBJECTS,
)
from smdistributed.modelparallel.torch.tensors.written import WritesCounted

_TENSOR: Any = torch.Tensor
_GRAD: Any = _TENSOR.grad.__get__
_SET_GRAD: Any = _TENSOR.grad.__set__
_DATA: Any = _TENSOR.data.__get__
_SET_DATA: Any = _TENSOR.data.__set__
_PLAIN = (torch.Tensor, nn.Parameter)


class OwnerKeeper(Protocol):
    """Who knows the ranks of the pipeline."""

    def is_of_library(self) -> bool:
        """Whether code of this library has called a function of torch."""

    def check_use(self, names: str, what: str) -> None:
        """Raises where nothing may be computed with what one rank has; see ``Keeper``."""

    def needs_values(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the form of what a function gives depends on values."""

    def sharing_memory(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns a tensor and those that share its memory; None if some cannot be found."""

    def leave(self, place: str, values: torch.Tensor) -> None:
        """Leaves values for the ranks that lack them, by the name of the place where it is."""


@dataclass(frozen=True)
class Owned:
    """What is known of an owned tensor.

    Attributes:
        keeper: knows the other ranks.
        origin: how it came about; its one owner is this rank.
        is_own: whether it is a model's own tensor, or a gradient.
        sees_own: whether it sees the memory of one, all of it (``.data``).
    """

    keeper: OwnerKeeper
    origin: Origin
    is_own: bool = False
    sees_own: bool = False

    @property
    def writes_to_own(self) -> bool:
        """Whether what is written to it is written to a model's own tensor, all of it."""
        return self.is_own or self.sees_own

    def written(self, by: Origin) -> Owned:
        """Returns what is known after a call has written to it."""
        origin = replace(self.origin, digest=by.digest) if self.writes_to_own else by
        return replace(self, origin=origin)


class OwnedTensor(torch.Tensor, metaclass=LikeTensor):
    """See the module; for ``isinstance`` parameters stay such."""

    owned: Owned

    @classmethod
    @run_as_written
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got such a tensor."""
        if any(not issubclass(each, cls) and hasattr(each, "operate") for each in types):
            return NotImplemented  # absent ones, and those in parts, know what to do
        if func in (_SET_DATA, _SET_GRAD) and hasattr(type(args[1]), "operate"):
            # Of two tensors torch asks the first one only.
            return type(args[1]).__torch_function__(func, types, args, kwargs or {})
        given = owned_in((args, kwargs or {}))
        if not given:  # what was owned is awake
            with past_subclass_functions():
                return func(*args, **(kwargs or {}))
        if given[0].owned.keeper.is_of_library() or inside_transform():
            with awake(given):
                return func(*args, **(kwargs or {}))
        return follow(func, args, kwargs or {})


def follow(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function on owned tensors; what it gives is owned, unless Python reads it."""
    given = owned_in((args, kwargs))
    if func in OF_OBJECTS or func in HOOKING_GRADIENTS or func in ABOUT:
        with awake(given):
            return func(*args, **kwargs)
    if func == _GRAD:
        return gradient_of(args[0])
    if is_foreach(func):
        return one_by_one(functools.partial(_with_one, func), args, kwargs)
    if func is _TENSOR.__iter__:
        return iter(track(_TENSOR.unbind, args, kwargs))
    if func is _TENSOR.__deepcopy__:
        return _copied(args[0], args[1])
    if func == _SET_DATA:
        return _set_data(*args)
    return track(func, args, kwargs)


def track(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function whose tensors are all used alike; see ``follow``."""
    given = owned_in((args, kwargs))
    about: Owned = given[0].owned
    origins = [each.owned.origin for each in given]
    names = Origin.of_call(origins, "").names
    about.keeper.check_use(shortened(names), name_of(func))
    check_not_traced(func, shortened(names))
    if func in BACKWARD:
        raise not_differentiated(func, names)
    check_forms(func, (args, kwargs), origins)
    if func in GIVING_VALUES or about.keeper.needs_values(func, args, kwargs):
        leave(given)
        with awake(given):
            return read_only(func(*args, **kwargs))
    told = _TENSOR.detach if func == _DATA else func
    origin = _origin(given, told, args, kwargs)
    with noting_writes((args, kwargs), about.keeper, origin), awake(given):
        result = func(*args, **kwargs)
    check_forms(func, result, origins)
    if func == _SET_GRAD and is_owned(args[1]) and is_owned(args[0]):
        args[1].owned = _of_gradient(args[0])
    if func not in MAKING_LIKE:
        sees_own = told is _TENSOR.detach and about.writes_to_own
        _own_results(result, (args, kwargs), about.keeper, origin, sees_own=sees_own)
    return result


def _set_data(tensor: Any, data: Any) -> None:
    """Gives a tensor other data, as ranks that lack one of them do; see ``absence.set_data``."""
    given = owned_in((tensor, data))
    about = with_data(tensor, data)
    about.keeper.check_use(shortened(about.origin.names), name_of(_SET_DATA))
    with awake(given):
        _SET_DATA(tensor, data)
    wake(tensor)
    own_up(tensor, about)


def with_data(tensor: Any, data: Any) -> Owned:
    """Returns what is known of a tensor that is given other data, where one of both is owned."""
    given = owned_in((tensor, data))
    origin = _origin(given, _SET_DATA, (tensor, data), {})
    about: Owned = given[0].owned
    if is_owned(tensor) and (about.is_own or not is_owned(data)):
        return about.written(origin)
    return Owned(about.keeper, replace(data.owned.origin, digest=origin.digest))


def _own_results(
    result: Any, arguments: Any, keeper: OwnerKeeper, origin: Origin, *, sees_own: bool = False
) -> None:
    known = set(map(id, _tensors_of(arguments)))
    for place, each in enumerate(_tensors_of(result)):
        if id(each) not in known:
            own_up(each, Owned(keeper, origin.at(str(place)), sees_own=sees_own))


def note_gradients(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Takes note of what ``torch.autograd.grad`` gives for owned tensors."""
    given = owned_in((args, kwargs))
    if given:
        origin = _origin(given, func, args, kwargs)
        _own_results(result, (args, kwargs), given[0].owned.keeper, origin)


def _origin(given: Iterable[Any], func: Any, args: Any, kwargs: Any) -> Origin:
    origins = [each.owned.origin for each in given]
    return Origin.of_call(origins, digest_of(func, args, kwargs, digest_in))


@contextlib.contextmanager
def noting_writes(arguments: Any, keeper: OwnerKeeper, origin: Origin) -> Iterator[None]:
    """Inside, a call with owned tensors runs, by which those that it writes to are owned."""
    tensors = _tensors_of(arguments)
    versions = [version_of(each) for each in tensors]
    with WritesCounted():
        yield
    noted: set[int] = set()
    for place, (each, version) in enumerate(zip(tensors, versions, strict=True)):
        if version_of(each) != version and id(each) not in noted:
            noted.add(id(each))
            note_write(each, keeper, origin.at(f"to {place}"))


def note_write(tensor: torch.Tensor, keeper: OwnerKeeper, origin: Origin) -> None:
    """Has a tensor be owned to which something owned was written, and what shares its memory."""
    if is_owned(tensor):
        made: Any = tensor
        made.owned = made.owned.written(origin)
        return
    for each in keeper.sharing_memory(tensor) or [tensor]:
        own_up(each, Owned(keeper, origin))


def note_call(func: Any, args: Any, kwargs: Any) -> None:
    """Takes note of a call that writes to its first tensor, if that is owned."""
    if is_owned(args[0]):
        origin = _origin(owned_in((args, kwargs)), func, args, kwargs)
        note_write(args[0], args[0].owned.keeper, origin.at("to 0"))


def leave(given: Iterable[OwnedTensor]) -> None:
    """Leaves values for the ranks that lack them."""
    for each in given:
        with past_subclass_functions():
            each.owned.keeper.leave(place_of(each.owned.origin.digest), each.detach())


def gradient_of(parameter: Any) -> torch.Tensor | None:
    """Returns the gradient of a tensor; of one that is owned it is owned, too."""
    with past_subclass_functions():
        gradient: torch.Tensor | None = parameter.grad
    if gradient is not None and is_owned(parameter):
        own_up(gradient, _of_gradient(parameter))
    return gradient


def _of_gradient(parameter: Any) -> Owned:
    about = parameter.owned
    return Owned(about.keeper, about.origin.of_gradient(), is_own=True)


def _with_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of many tensors on one, which is owned, or which every rank has."""
    run = track if owned_in((args, kwargs)) else _plainly
    return run(func, args, kwargs)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _copied(tensor: OwnedTensor, memo: dict[int, Any]) -> Any:
    """Returns what deepcopy makes of an owned tensor, as it does of an absent one."""
    if id(tensor) not in memo:
        about = of_copy(tensor)
        with awake([tensor]):
            copied = copy.deepcopy(tensor)
        assert about is not None
        own_up(copied, about)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def of_copy(tensor: Any) -> Owned | None:
    """Returns what is known of a copy, if the tensor is owned: as of one that absent ones have."""
    if not is_owned(tensor):
        return None
    origin: Origin = tensor.owned.origin
    for func in (_TENSOR.detach, _TENSOR.clone):
        origin = _of_one(func, tensor, origin)
    return Owned(tensor.owned.keeper, origin)


def _of_one(func: Any, tensor: torch.Tensor, origin: Origin) -> Origin:
    digest = digest_of(func, (tensor,), {}, lambda _: origin.digest)
    return replace(origin, digest=digest).at("0")


def own_up(tensor: torch.Tensor, about: Owned) -> None:
    """Makes a tensor owned, if it is of torch's own class or in parts, and not owned yet."""
    made: Any = tensor
    if hasattr(type(tensor), "lying"):
        vars(made).setdefault("owned", about)
    elif type(tensor) in _PLAIN and not is_wrapped(tensor):
        is_parameter = type(tensor) is nn.Parameter
        made.__class__ = OwnedTensor
        if is_parameter:
            made._is_param = True
        made.owned = about


def wake(tensor: Any) -> Owned | None:
    """Makes a tensor no longer owned; returns what was known of it, if it was."""
    known = vars(tensor)
    about: Owned | None = known.pop("owned", None)
    if type(tensor) is OwnedTensor:
        made: Any = tensor
        made.__class__ = nn.Parameter if known.pop("_is_param", False) else torch.Tensor
    return about


def wake_all(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, Owned]]:
    """Makes tensors no longer owned; returns those that were, and what was known of them."""
    return [(each, about) for each in tensors if (about := wake(each)) is not None]


@contextlib.contextmanager
def awake(tensors: Iterable[OwnedTensor]) -> Iterator[None]:
    """Inside, owned tensors are tensors of torch."""
    known = wake_all(tensors)
    try:
        yield
    finally:
        for each, about in known:
            own_up(each, about)


def owned_in(structure: Any) -> list[Any]:
    """Returns the owned tensors in arguments, each once."""
    leaves = pytree.tree_leaves(structure)
    return list({id(each): each for each in leaves if is_owned(each)}.values())


def is_owned(value: Any) -> bool:
    """Whether a value is a tensor that this rank, or those of its partition, alone have."""
    return isinstance(value, torch.Tensor) and "owned" in vars(value)


def is_shown(value: Any) -> bool:
    """Whether a tensor in parts is whole just now; see ``parts.at_rest``."""
    return is_owned(value) and type(value) in _PLAIN


def digest_in(tensor: Any) -> str | None:
    """Returns how a tensor came about, if one rank has it."""
    return tensor.owned.origin.digest if is_owned(tensor) else None


def _tensors_of(result: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


def read_only(result: Any) -> Any:
    """Returns an array that nobody can write to: what is written there no other rank would see."""
    if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
        result = result.copy()
        result.setflags(write=False)
    return result
