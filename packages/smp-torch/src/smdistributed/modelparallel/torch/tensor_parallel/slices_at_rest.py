"""Between steps parameters are slices, and code that takes one for the whole is told so.

Optimizers, averages of weights and clipping by value work number by number: of a slice they give
the slice of what they give of the whole. A norm, a mean or a row does not. So between steps slices,
their gradients and what is made of these have no memory that a kernel could read
(``compat.private.below``): each operation, from wherever it comes, is asked whether PyTorch tags it
as pointwise, or whether it moves numbers and keeps all of them. Then it has the slices, and what
comes of them is a slice again. Everything else is refused. Code of this library uses slices as they
are.

``tensor.as_subclass(torch.Tensor)`` gives who wants it the slice without the class.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private import below
from smdistributed.modelparallel.torch.compat.private.below import (
    is_of_unusable_tensor,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    OpOverload,
    TorchDispatchMode,
    is_wrapped,
    past_subclass_functions,
    past_watchers,
    pytree,
)
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import SliceReadError

_OWN_PACKAGE = __name__.partition(".torch.")[0]
#: Whose frames lie between an operation and the code that wants it.
_BETWEEN = frozenset(("torch", "contextlib", "functools", "copy"))
_MECHANISM = frozenset((__name__, below.__name__))
#: Move numbers and keep them all, or make others of the same shape; PyTorch does not tag them.
_KEEPING = frozenset(
    (
        *("alias", "clone", "copy", "copy_", "detach", "detach_", "fill", "fill_", "lift_fresh"),
        *("empty_like", "full_like", "ones_like", "zeros_like", "zero", "zero_", "_to_copy"),
        *("resolve_conj", "resolve_neg", "_has_compatible_shallow_copy_type"),
    )
)
_Tensor: Any = torch.Tensor
_GRADIENT: Any = _Tensor.grad
_DATA: Any = _Tensor.data
#: What gives a tensor other memory, or a gradient, to which that must be alike.
_GIVING = frozenset((_DATA.__set__, _GRADIENT.__set__, _Tensor.share_memory_))


class SliceAtRest(torch.Tensor):
    """The class of slices between steps; for ``isinstance`` parameters stay such."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got a slice; its operations come to ``operate``."""
        kwargs = kwargs or {}
        with past_subclass_functions():
            if func in _GIVING or _is_of_library():
                with _shown(_slices_in((args, kwargs))):
                    return func(*args, **kwargs)
            if func == _DATA.__get__:
                func = _Tensor.detach
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if not is_of_unusable_tensor(error):
                    raise
                raise _refusal(func, name_of(next(_slices_in((args, kwargs))))) from error
            if isinstance(result, torch.UntypedStorage | torch.TypedStorage):
                raise _refusal(func, name_of(args[0]))
            if func == _GRADIENT.__get__ and type(result) is torch.Tensor:
                _hide(result, name_of(args[0]))
        return result

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that works number by number; see ``compat.private.below``.

        Raises:
            SliceReadError: it does not.
        """
        slices = list(_slices_in((args, kwargs)))
        if not slices:
            raise _refusal(func, "a parameter")
        with past_subclass_functions(), _shown(slices):
            if _is_of_library():
                return func(*args, **kwargs)
            with _Pointwise(name_of(slices[0])) as judge:
                result = func(*args, **kwargs)
            judge.hide_results(result)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says whose slice it is, and its numbers."""
        return f"slice of {name_of(self)}: {_plain(self)!r}"

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, it is what it was."""
        name = name_of(self)
        _wake(self)
        try:
            yield
        finally:
            _hide(self, name)

    def as_subclass(self, cls: Any) -> Any:
        """Returns the slice itself, as another class."""
        with past_subclass_functions(), _shown([self]):
            return super().as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is written as the slice without the class."""
        return _plain(self).__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        """Is copied with its class."""
        return _hide(copy.copy(_plain(self)), name_of(self))

    def __deepcopy__(self, memo: Any) -> Any:
        """Is copied with its class."""
        memo[id(self)] = _hide(_plain(self).__deepcopy__(memo), name_of(self))
        return memo[id(self)]


def rest(slices: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Has parameters that are slices, and their gradients, refuse what takes them for the whole.

    Args:
        slices: parameters with their names.
    """
    for tensor, name in slices:
        if type(tensor) is nn.Parameter and not tensor.is_meta:
            gradient = tensor.grad
            _hide(tensor, name)
            if type(gradient) is torch.Tensor:
                _hide(gradient, name)


def wake(slices: Iterable[torch.Tensor]) -> None:
    """Gives parameters, and their gradients, back what they are."""
    with past_subclass_functions():
        for tensor in slices:
            for each in (tensor, tensor.grad):
                if isinstance(each, SliceAtRest):
                    _wake(each)


def refuse_slices(function: Any, tensors: Iterable[object]) -> None:
    """Raises if a function, which takes tensors for whole ones, is given slices.

    Raises:
        SliceReadError: it is.
    """
    for each in tensors:
        if isinstance(each, SliceAtRest):
            raise _refusal(function, name_of(each))


_NAME = "_smp_slice_of"
#: Where a slice keeps its numbers while it has none that a kernel could read.
_ITSELF = "_smp_slice"
#: How torch knows a parameter of another class.
_IS_PARAMETER = "_is_param"


def name_of(tensor: torch.Tensor) -> str:
    """Returns the name of the parameter that a tensor comes from."""
    return str(vars(tensor).get(_NAME, "a parameter"))


def _hide(tensor: torch.Tensor, name: str) -> Any:
    """Takes the numbers of a slice away; returns it."""
    about = vars(tensor)
    about[_NAME] = name
    about[_ITSELF] = data = tensor.data
    tensor.data = _vacant(data.shape, data.dtype, data.device)
    if isinstance(tensor, nn.Parameter):
        about[_IS_PARAMETER] = True
    tensor.__class__ = SliceAtRest
    return tensor


def _show(tensor: torch.Tensor) -> bool:
    """Gives a slice its numbers; returns whether it had none."""
    data = vars(tensor).pop(_ITSELF, None)
    if data is not None:
        tensor.data = data
    return data is not None


def _wake(tensor: torch.Tensor) -> None:
    """Makes a slice what it was."""
    _show(tensor)
    is_parameter = vars(tensor).pop(_IS_PARAMETER, False)
    tensor.__class__ = nn.Parameter if is_parameter else torch.Tensor


@contextlib.contextmanager
def _shown(slices: Iterable[SliceAtRest]) -> Iterator[None]:
    """Inside, slices have their numbers. To be entered past functions of subclasses."""
    with past_watchers():
        hidden = [each for each in slices if _show(each)]
    try:
        yield
    finally:
        with past_watchers():
            for each in hidden:
                _hide(each, name_of(each))


#: What has no memory of a form, which slices share.
_vacant = functools.lru_cache(maxsize=1024)(functools.partial(without_memory, operated=SliceAtRest))


def _plain(tensor: SliceAtRest) -> Any:
    """Returns a tensor of the same numbers, without the class."""
    with past_subclass_functions(), _shown([tensor]):
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.data, tensor.requires_grad)
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


class _Pointwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operations have slices that work number by number, and refuses others.

    Args:
        name: of the parameter, for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._made: list[torch.Tensor] = []

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
        for each in _of_slices(func, args, kwargs, result):
            if type(each) is torch.Tensor:
                each.__class__ = SliceAtRest
                self._made.append(each)
        return result

    def hide_results(self, result: Any) -> None:
        """Hides what came of slices; autograd makes other objects of views."""
        made = list(self._made)
        others = [each for each in pytree.tree_iter(result) if type(each) is torch.Tensor]
        if others:
            memories = set(map(storage_of, made))
            made += [
                each for each in others if not is_wrapped(each) and storage_of(each) in memories
            ]
        with past_watchers():
            for each in made:
                _hide(each, self._name)


def _of_slices(func: OpOverload, args: Any, kwargs: Any, result: Any) -> Iterator[Any]:
    """Yields what an operation that got slices has made of them, or written to.

    In lists what is at a place goes with what is there in the others.
    """
    parameters = func._schema.arguments
    named = {each.name: value for each, value in zip(parameters, args, strict=False)} | kwargs
    written = [
        named[each.name]
        for each in parameters
        if each.alias_info is not None and each.alias_info.is_write and each.name in named
    ]
    lists = [each for each in named.values() if isinstance(each, list | tuple)]
    places = {at for each in lists for at, one in enumerate(each) if isinstance(one, SliceAtRest)}
    is_any = any(isinstance(each, SliceAtRest) for each in named.values())
    for each in (result, *written):
        if isinstance(each, list | tuple):
            yield from (one for at, one in enumerate(each) if is_any or at in places)
        else:
            yield each


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


def _slices_in(structure: Any) -> Iterator[SliceAtRest]:
    return (each for each in pytree.tree_leaves(structure) if isinstance(each, SliceAtRest))


def _is_of_library() -> bool:
    """Whether code of this library has called, by way of torch or not."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module not in _MECHANISM and module.partition(".")[0] not in _BETWEEN:
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
