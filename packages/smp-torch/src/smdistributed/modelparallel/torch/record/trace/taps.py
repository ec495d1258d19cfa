"""Tensors that leave a leaf by another way than its result.

A forward hook that collects what an inner module returned, or an attribute that an inner module
sets, carries a tensor out of a module that is executed as a whole. Where recorded code then uses
it, the leaf is *tapped*: replays fetch the tensor at the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.state.growth import Growth
from smdistributed.modelparallel.torch.state.reach import OF_MODULES, is_users
from smdistributed.modelparallel.torch.tensors.nested import Path, follow, tensor_paths

_OWN_PACKAGE = __name__.partition(".")[0]


class Kept(NamedTuple):
    """A container that tensors are kept in; one is not another because it has the same in it."""

    obj: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self.obj is other.obj

    def __hash__(self) -> int:
        return id(self.obj)


class Tap(NamedTuple):
    """Where a tensor is found besides the result of a leaf.

    Attributes:
        module: the inner module; or a container.
        call: which of its calls within the leaf's call returns it; None for an attribute, and for
            what is in a container, which are read when the leaf has returned.
        path: where in the result, or the name of the attribute.
        name: of the inner module or the container, the same on every rank.
    """

    module: nn.Module | Kept
    call: int | None
    path: Path
    name: str


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
        for key, value in growth.added.items():
            has_place = isinstance(growth.obj, dict) or key in growth.before
            if isinstance(value, FakeTensor) and has_place:
                yield (
                    Tap(Kept(growth.obj), None, (("attribute", "obj"), ("item", key)), growth.name),
                    value,
                )


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


def tapped(leaf: nn.Module, taps: Sequence[Tap]) -> Callable[..., tuple[Any, list[torch.Tensor]]]:
    """Returns a call of a leaf that gives its result and the tensors at ``taps``."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        calls: dict[Any, list[Any]] = {tap.module: [] for tap in taps if tap.call is not None}
        handles = [
            module.register_forward_hook(
                lambda module, args, result, kept=kept: kept.append(result)
            )
            for module, kept in calls.items()
        ]
        try:
            result = leaf(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return result, [
            follow(tap.module if tap.call is None else calls[tap.module][tap.call], tap.path)
            for tap in taps
        ]

    return call
