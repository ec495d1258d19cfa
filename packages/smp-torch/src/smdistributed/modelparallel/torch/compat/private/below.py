"""Operations on tensors below the functions of torch that Python calls, beyond its public API.

``__torch_function__`` sees what Python calls. TorchScript, transforms of torch.func, nested tensors
and C++ come to the dispatcher by other ways, and that knows tensors by keys. So a tensor without
memory here has a key that comes before all others, and that nothing of torch has a kernel for:
each operation on it is handed to its class, before anything reads memory that is not there. Parts
of parameters are such tensors: shards are gathered then, slices are refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensor,
    past_subclass_functions,
    pytree,
)

#: Reserved for others than PyTorch, who none of them is here.
_KEY = "DeferredInit"
_key: Any = torch._C._dispatch_key_parse(_KEY)
_KEYS = torch._C.DispatchKeySet(_key)
#: Parts of what torch says where it could not use a tensor without memory, or with a class of its
#: own, and did not ask that class.
_UNUSABLE = (
    "Cannot access data pointer of Tensor",
    "its data is not allocated yet",
    "Attempted to access the data pointer on an invalid python storage",
    "on a tensor with unallocated storage",
    "torch/csrc/utils/python_dispatch.cpp",  # where a mode is active, of operations made later
    "all __torch_dispatch__ handlers returned NotImplemented",
    "requires that detach() returns an instance of the same type",
)
#: Operations that give a tensor other memory, or ask whether that can be: they read none.
_READING_NOTHING = ("aten::set_data", "aten::_has_compatible_shallow_copy_type")


class Operated(Protocol):
    """A class of tensors without memory."""

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that got such a tensor and came past ``__torch_function__``."""


class _Vacant(torch.Tensor):
    """Only torch's own wrappers are made without memory."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as torch's wrappers
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True  # it is assigned to data where autograd does not take part
        raise NotImplementedError(func)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuses an operation on what has no class that could run it.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{func} got a parameter, or a gradient, of which other ranks have parts, by way of "
            "its data: give compiled code what parameter.clone() returns, which has all of it."
        )


def without_memory(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    operated: type[Operated] = _Vacant,
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Returns what makes a tensor one without memory that is assigned to its ``data``.

    Args:
        shape: what is told about it.
        dtype: likewise.
        device: likewise.
        operated: runs operations on what shares its data and is of no such class, as ``.data``.
        stride: likewise what is told; None for that of what is contiguous.
    """
    _register()
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _Vacant, shape, stride, dtype=dtype, device=device, _extra_dispatch_keys=_KEYS
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    storage: Any = made.untyped_storage()
    storage.operated = operated
    return made


#: Where a tensor that shows data without memory keeps its own data; and what it shows.
HIDDEN = "_smp_hidden"


def give(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives a tensor other data, which it hides if it hides its own."""
    hidden = vars(tensor).get(HIDDEN)
    if hidden is None:
        tensor.data = data
    else:
        vars(tensor)[HIDDEN] = data, hidden[1]


def operated_by(tensor: torch.Tensor) -> type[Operated] | None:
    """Returns what operations on a tensor come to; None for a tensor that has memory."""
    if not torch._C._dispatch_keys(tensor).has(_key):
        return None
    found: Any = type(tensor)
    if not hasattr(found, "operate"):
        with past_subclass_functions():
            storage: Any = tensor.untyped_storage()
        # What was made of such a tensor past all functions has a storage of its own.
        found = getattr(storage, "operated", _Vacant)
    return found  # type: ignore[no-any-return]


def past_operations() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors without memory are as others: for what reads no values of them."""
    context: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_KEYS)
    return context


def is_of_unusable_tensor(error: BaseException) -> bool:
    """Tells whether torch raised an error since a tensor has no memory, or a class of its own."""
    return any(each in str(error) for each in _UNUSABLE)


@functools.cache
def _register() -> list[Any]:
    """Has all operations on tensors with the key come to ``_operate``; returns what keeps it so.

    A fallback alone is not found where a mode is active, or beside a tensor whose class has
    ``__torch_dispatch__``, such as a nested one; so each operation that there is has its own.
    """
    made: Any = torch.library.Library  # without types
    fallback = made("_", "IMPL")
    fallback.fallback(_operate, _KEY)
    libraries: dict[str, Any] = {}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operation = name.partition("::")
        if space not in libraries:
            libraries[space] = torch._C._dispatch_library("IMPL", space, _KEY)
        run: Any = functools.partial(_operate_named, name)
        if name in _READING_NOTHING:
            run = torch.library.fallthrough_kernel
        libraries[space].impl(operation, _KEY, run)
    return [fallback, *libraries.values()]


def _operate_named(name: str, *args: Any, **kwargs: Any) -> Any:
    return _operate(_overload(name), *args, **kwargs)


@functools.cache
def _overload(name: str) -> Any:
    space, _, operation = name.partition("::")
    packet, _, overload = operation.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _operate(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [each for each in pytree.tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    classes = [each for each in map(type, tensors) if hasattr(each, "operate")]
    # Of what has none, the data tells.
    found: Iterator[Any] = itertools.chain(classes, filter(None, map(operated_by, tensors)))
    return next(found, _Vacant).operate(func, args, kwargs)


class Scripted(functools.partial[Any]):
    """A function of TorchScript for a class of tensors; modes of torch functions do not see it."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        if _has_fakes(list(pytree.tree_iter((args, kwargs)))):
            return _by_operations(self.args[0], args, kwargs)
        return super().__call__(*args, **kwargs)


@contextlib.contextmanager
def scripted_functions_seen() -> Iterator[None]:
    """Inside, functions of TorchScript are functions of torch for tensors that are ``Operated``.

    What TorchScript fuses reads memory past the dispatcher, and asks for a shape past everything;
    of what is refused it makes an error of its own. Methods of its modules torch tells
    ``__torch_function__`` of by itself. On fakes, which have no memory, nothing is fused.
    """
    kind: Any = torch._C.ScriptFunction
    method: Any = torch._C.ScriptMethod
    original, original_method = kind.__call__, method.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = list(pytree.tree_iter((args, kwargs)))
        for each in leaves:
            if hasattr(type(each), "operate"):
                run = Scripted(original, function)
                run.__name__ = function.name  # type: ignore[attr-defined]
                return each.__torch_function__(run, (), args, kwargs)
        if _has_fakes(leaves):
            return _by_operations(function, args, kwargs)
        return original(function, *args, **kwargs)

    def call_method(function: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_fakes(list(pytree.tree_iter((args, kwargs)))):
            return _by_operations(function, (function.owner, *args), kwargs)
        return original_method(function, *args, **kwargs)

    kind.__call__, method.__call__ = call, call_method
    try:
        yield
    finally:
        kind.__call__, method.__call__ = original, original_method


def _has_fakes(leaves: Sequence[Any]) -> bool:
    return any(isinstance(each, FakeTensor) for each in leaves)


def _by_operations(function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Runs what TorchScript has made operation by operation, with nothing fused."""
    rest = function.schema.arguments[len(args) :]
    given = (kwargs.get(each.name, each.default_value) for each in rest)
    interpret: Any = getattr(torch._C, "_jit_interpret_graph")  # noqa: B009 # it has no stub
    return interpret(function.inlined_graph, (*args, *given))
