"""Tensors that leave a leaf by another way than its result.

A forward hook that collects what an inner module returned, an attribute that an inner module sets,
or a penalty that it adds to a list carries a tensor out of a module that is executed as a whole.
Where recorded code then uses it, the leaf is *tapped*: replays fetch the tensor at the same place,
or where nothing but the call that made it is known, from the same call.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.compiled import run_eagerly
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.state.growth import Growth
from smdistributed.modelparallel.torch.state.reach import OF_MODULES, is_users
from smdistributed.modelparallel.torch.state.spots import name_of_key
from smdistributed.modelparallel.torch.tensors.nested import Path, follow, tensor_paths

_ROWS = (list, collections.deque)
_OWN_PACKAGE = __name__.partition(".")[0]


class Kept(NamedTuple):
    """A container that tensors are kept in; one is not another because it has the same in it."""

    obj: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self.obj is other.obj

    def __hash__(self) -> int:
        return id(self.obj)


class Function(NamedTuple):
    """A function of torch that a leaf calls."""

    function: Any


class Tap(NamedTuple):
    """Where a tensor is found besides the result of a leaf.

    Attributes:
        module: the inner module; or a container, or a function of torch.
        call: which of its calls within the leaf's call returns it, of a function among those that
            return tensors; None for an attribute, and for what is in a container, which are read
            when the leaf has returned.
        path: where in the result, or the name of the attribute.
        name: of the inner module, the entry of the container or the function, the same on every
            rank.
        num_calls: of a function, how many calls return tensors; a replay must make as many.
    """

    module: nn.Module | Kept | Function
    call: int | None
    path: Path
    name: str
    num_calls: int = 0

    def __str__(self) -> str:
        """Says which one it is, the same on every rank."""
        path = "" if isinstance(self.module, Kept) else f" {self.path}"  # it has the key itself
        return f"{self.name} {self.call}{path}"


def attribute_taps(leaf: nn.Module, names: dict[nn.Module, str]) -> Iterator[tuple[Tap, Any]]:
    """Yields the fakes that the modules of a leaf hold in attributes, and in tuples in these."""
    for module in leaf.modules():
        for key, value in vars(module).items():
            if key in OF_MODULES or type(value) not in (FakeTensor, tuple):
                continue
            for path, tensor in tensor_paths(value, (("attribute", key),)):
                if isinstance(tensor, FakeTensor):
                    yield Tap(module, None, path, names.get(module, "")), tensor


def container_taps(grown: Iterable[Growth]) -> Iterator[tuple[Tap, torch.Tensor]]:
    """Yields the fakes that a leaf puts into places of containers.

    Not those at the end of lists: where that is, calls for other microbatches decide.
    """
    for growth in grown:
        for place, (key, value) in enumerate(growth.added.items()):
            has_place = isinstance(growth.obj, dict) or key in growth.before
            if isinstance(value, FakeTensor) and has_place:
                name = f"{growth.name}.{name_of_key(key, place)}"
                path = (("attribute", "obj"), ("item", key))
                yield Tap(Kept(growth.obj), None, path, name), value


def function_taps(
    made: Iterable[tuple[Any, str, Sequence[tuple[Path, torch.Tensor]]]],
) -> Iterator[tuple[Tap, torch.Tensor]]:
    """Yields what the functions of torch give that a leaf calls.

    Args:
        made: of each call, in their order, the function, its name, and the tensors in its result.
    """
    # What no function mode sees, a function of autograd, is not counted in a replay either.
    seen = [
        (function, name, outputs)
        for function, name, outputs in made
        if outputs and isinstance(function, Hashable) and not _is_of_autograd(function)
    ]
    totals = collections.Counter(function for function, *_ in seen)
    calls: collections.Counter[Any] = collections.Counter()
    for function, name, outputs in seen:
        for path, tensor in outputs:
            number, total = calls[function], totals[function]
            yield Tap(Function(function), number, path, name, total), tensor
        calls[function] += 1


def _is_of_autograd(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), type)


class _Calls(TorchFunctionMode):
    """Keeps what some functions return.

    Args:
        kept: by function; filled.
    """

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._kept and next(tensor_paths(result), None) is not None:
            self._kept[func].append(result)
        return result


def has_hooks_of_others(module: nn.Module) -> bool:
    """Whether somebody has put forward hooks on a module."""
    return any(True for _ in _hooks_of_others(module))


def has_hooks_of_packages(module: nn.Module) -> bool:
    """Whether an installed package has put forward hooks on a module: to collect what it gives.

    What it collects need not be a tensor that would be missed; that calls are counted is enough.
    """
    return any(
        not is_users(getattr(hook, "__module__", "") or "") for _, hook in _hooks_of_others(module)
    )


@contextlib.contextmanager
def hooks_of_packages_removed(leaf: nn.Module) -> Iterator[None]:
    """Keeps what packages collect from seeing a run that the user's code did not ask for.

    The user's own hooks see it: they may be part of what the leaf does, and what they change is put
    back.
    """
    removed = []
    for module in leaf.modules():
        for key, hook in _hooks_of_others(module):
            name = getattr(hook, "__module__", "") or ""
            if not (is_users(name) or name.startswith("torch.")):
                removed.append((module, module._forward_hooks.copy()))
                del module._forward_hooks[key]
    try:
        yield
    finally:
        for module, hooks in reversed(removed):
            module._forward_hooks = hooks


def call_hooks(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    """Calls the forward hooks of a module; what they return is known already."""
    for key, hook in _hooks_of_others(module):
        if key in module._forward_hooks_with_kwargs:
            hook(module, args, kwargs, result)
        else:
            hook(module, args, result)


def _hooks_of_others(module: nn.Module) -> Iterator[tuple[int, Callable[..., Any]]]:
    for key, hook in list(module._forward_hooks.items()):
        if not (getattr(hook, "__module__", "") or "").startswith(_OWN_PACKAGE):
            yield key, hook


def tapped(
    leaf: nn.Module, taps: Sequence[Tap], taken: Sequence[Any] = ()
) -> Callable[..., tuple[Any, list[torch.Tensor]]]:
    """Returns a call of a leaf that gives its result and the tensors at ``taps``.

    Args:
        leaf: the module.
        taps: where.
        taken: containers that have in the end what was in them before.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        calls: dict[Any, list[Any]] = {tap.module: [] for tap in taps if tap.call is not None}
        with contextlib.ExitStack() as stack:
            for module, kept in calls.items():
                if isinstance(module, nn.Module):
                    stack.enter_context(_results_kept(module, kept))
            functions = {
                each.function: kept for each, kept in calls.items() if isinstance(each, Function)
            }
            if functions:
                stack.enter_context(run_eagerly(list(leaf.modules())))
                stack.enter_context(_Calls(functions))
            before = [copy.copy(each) for each in taken]
            result = leaf(*args, **kwargs)
        for tap in taps:
            if isinstance(tap.module, Function) and len(calls[tap.module]) != tap.num_calls:
                raise _calls_differ(leaf, tap, len(calls[tap.module]))
        found = [
            follow(tap.module if tap.call is None else calls[tap.module][tap.call], tap.path)
            for tap in taps
        ]
        for container, content in zip(taken, before, strict=True):
            container.clear()
            (container.extend if isinstance(content, _ROWS) else container.update)(content)
        return result, found

    return call


def _calls_differ(leaf: nn.Module, tap: Tap, num_calls: int) -> UnsupportedError:
    return UnsupportedError(
        f"a {type(leaf).__name__} called {tap.name} {num_calls} times, and {tap.num_calls} times "
        "when its step was recorded: code outside reads a tensor that one of these calls made, and "
        "it is not known which. Return the tensor from the forward of the module."
    )


@contextlib.contextmanager
def _results_kept(module: nn.Module, kept: list[Any]) -> Iterator[None]:
    """Inside, what a module returns is added to a list."""
    handle = module.register_forward_hook(lambda module, args, result: kept.append(result))
    try:
        yield
    finally:
        handle.remove()
