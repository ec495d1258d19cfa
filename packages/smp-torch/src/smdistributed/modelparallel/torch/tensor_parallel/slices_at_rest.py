"""Between steps parameters are slices, and code that takes one for the whole is told so.

Optimizers, averages of weights and clipping by value work number by number: of a slice they give
the slice of what they give of the whole. A norm, a mean or a row does not. So between steps slices,
their gradients and what is made of these have a class that lets operations pass which PyTorch tags
as pointwise, and those that move numbers and keep all of them; what comes of them is a slice again.
Everything else is refused. Code of this library uses slices as they are.

``tensor.as_subclass(torch.Tensor)`` gives who wants it the slice without the class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import (
    OpOverload,
    TorchDispatchMode,
    past_subclass_functions,
    pytree,
)
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import SliceReadError

_OWN_PACKAGE = __name__.partition(".torch.")[0]
#: Move numbers and keep them all, or make others of the same shape; PyTorch does not tag them.
_KEEPING = frozenset(
    (
        *("alias", "clone", "copy", "copy_", "detach", "detach_", "fill", "fill_", "lift_fresh"),
        *("empty_like", "full_like", "ones_like", "zeros_like", "zero", "zero_", "_to_copy"),
        *("resolve_conj", "resolve_neg", "_has_compatible_shallow_copy_type"),
    )
)
#: Gives numbers to what is not torch.
_LEAVING = {
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "__contains__", "__len__")
}
_Tensor: Any = torch.Tensor
_GRADIENT: Any = _Tensor.grad.__get__
_PLAIN: Any = torch.Tensor.as_subclass


class SliceAtRest(torch.Tensor):
    """The class of slices, beside their own, between steps; see the module."""

    kind: ClassVar[Any]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says whose slice it is, and its numbers."""
        return f"slice of {name_of(self)}: {_plain(self)!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is written as the slice without the class."""
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Is copied with its class."""
        made = _plain(self).__deepcopy__(memo)
        memo[id(self)] = made
        made.__class__ = type(self)
        vars(made)[_NAME] = name_of(self)
        return made


def rest(slices: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Gives parameters that are slices, by their names, the class."""
    for tensor, name in slices:
        if type(tensor) is nn.Parameter:
            tensor.__class__ = _at_rest(nn.Parameter)
            vars(tensor)[_NAME] = name


def wake(slices: Iterable[torch.Tensor]) -> None:
    """Takes the class from parameters."""
    for tensor in slices:
        if isinstance(tensor, SliceAtRest):
            tensor.__class__ = type(tensor).kind


def refuse_slices(function: Any, tensors: Iterable[object]) -> None:
    """Raises if a function, which takes tensors for whole ones, is given slices.

    Raises:
        SliceReadError: it is.
    """
    for each in tensors:
        if isinstance(each, SliceAtRest):
            raise _refusal(function, name_of(each))


_NAME = "_smp_slice_of"


def name_of(tensor: torch.Tensor) -> str:
    """Returns the name of the parameter that a tensor comes from."""
    return str(vars(tensor).get(_NAME, "a parameter"))


@functools.cache
def _at_rest(kind: type[torch.Tensor]) -> Any:
    names = {"kind": kind, "__torch_function__": classmethod(_run)}
    return type(SliceAtRest.__name__, (SliceAtRest, kind), names)


def _plain(tensor: torch.Tensor) -> Any:
    """Returns a tensor of the same numbers, without the class."""
    with past_subclass_functions():
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.data.as_subclass(torch.Tensor), tensor.requires_grad)
        return tensor.as_subclass(torch.Tensor)


def _run(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Runs a function of torch that got a slice."""
    kwargs = kwargs or {}
    first = next(_slices_in((args, kwargs)), None)
    with past_subclass_functions():
        if first is None or func == _PLAIN or _is_of_library():
            return func(*args, **kwargs)
        name = name_of(first)
        if func in _LEAVING:
            raise _refusal(func, name)
        with _Pointwise(name):
            result = func(*args, **kwargs)
    return _taken(result, name) if func == _GRADIENT else result


class _Pointwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operations have slices that work number by number, and refuses others.

    Args:
        name: of the parameter, for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = next(_slices_in((args, kwargs)), None)
        if given is None:
            return func(*args, **kwargs)
        works = _works_by_number(func)
        result = func(*args, **kwargs) if works or func.is_view else None
        is_whole = isinstance(result, torch.Tensor) and result.numel() == given.numel()
        if not works and not is_whole:
            raise _refusal(func, self._name)
        return _taken(result, self._name)


@functools.cache
def _works_by_number(operation: OpOverload) -> bool:
    """Whether an operation works on each number of its tensors by itself."""
    own_name = operation.overloadpacket.__name__
    name = own_name.removeprefix("_foreach_")
    if torch.Tag.pointwise in operation.tags or name in _KEEPING:
        return True
    if name == own_name:
        return False
    of_one = getattr(torch.ops.aten, name)
    return any(torch.Tag.pointwise in getattr(of_one, each).tags for each in of_one.overloads())


def _taken(result: Any, name: str) -> Any:
    """Gives what comes of a slice the class of one; returns it."""
    for each in pytree.tree_leaves(result):
        if type(each) is torch.Tensor:
            each.__class__ = _at_rest(torch.Tensor)
            vars(each)[_NAME] = name
    return result


def _slices_in(structure: Any) -> Iterator[SliceAtRest]:
    return (each for each in pytree.tree_leaves(structure) if isinstance(each, SliceAtRest))


def _is_of_library() -> bool:
    """Whether code of this library has called, by way of torch or not."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "contextlib", "functools", "copy"):
            return module.startswith(_OWN_PACKAGE)
        frame = frame.f_back
    return False


def _refusal(func: Any, name: str) -> SliceReadError:
    what = torch.overrides.resolve_name(func) or getattr(func, "__name__", func)
    return SliceReadError(
        f"{what} was given {name}, or its gradient, or what was made of one; each tensor-parallel "
        "rank has a slice of that parameter, of which this gives something else than of the whole: "
        "only what works number by number may use it. The norm of all gradients is what "
        "torch.nn.utils.clip_grad_norm_ and get_total_norm return, which see whole tensors; "
        "model.state_dict() has whole weights; keep the module whole by "
        "smp.set_tensor_parallelism(module, enabled=False) before smp.DistributedModel; and "
        "tensor.as_subclass(torch.Tensor) is the slice as it is."
    )
