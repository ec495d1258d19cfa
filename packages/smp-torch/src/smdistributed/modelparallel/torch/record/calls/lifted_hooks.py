"""Which hooks that look at gradients are lifted out of modules that stay whole.

A module that stays whole runs on one rank, and so does all that is done in its backward pass. But
hooks on modules, and what forward hooks put on results, are of code outside, which reads what they
store on every rank. So they are lifted out: they run as hooks on activations between modules do,
and the module runs without them.

A hook that asks for the value of a gradient cannot, since no rank has one when Python runs. It
stays: it runs on the rank that has the module, on the real gradient, and what it stores is there
alone.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import number_of_hooks_ever
from smdistributed.modelparallel.torch.compat.private.modes import DATA_DEPENDENT
from smdistributed.modelparallel.torch.record.calls.forward_hooks import code_of
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber
from smdistributed.modelparallel.torch.state.reach import OF_MODULES
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.tensors.functions import MAKING_LISTS, SHOWING

_CALLS = nn.Module._call_impl.__qualname__
#: Of the gradients that hooks are tried out on.
_ANY_SHAPE = (2, 2, 2, 2)
_TABLES = ("_backward_hooks", "_backward_pre_hooks")


class LiftedHooks:
    """The hooks on the backward passes of modules that are lifted out of these.

    Args:
        modules: of all models.
        roots: those that are no part of another one, and may be split.

    Attributes:
        modules: those whose hooks are.
    """

    def __init__(self, modules: Iterable[nn.Module], roots: Container[nn.Module]) -> None:
        self._roots = roots
        self.modules: set[nn.Module] = set()
        self._every = list(modules)
        self._number = -1
        #: Those that run without their hooks at present.
        self._off: set[nn.Module] = set()

    @property
    def is_current(self) -> bool:
        """Whether none was registered or taken off since they were looked for: alike on all ranks.

        Registered hooks of other kinds count, too, of which ranks may have different numbers.
        """
        return self._number == number_of_hooks_ever() and all(map(self._has_hooks, self.modules))

    def _has_hooks(self, module: nn.Module) -> bool:
        return module in self._off or has_gradient_hooks(module)

    @contextlib.contextmanager
    def taken_off(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, some modules have no hooks on their backward passes."""
        former, self._off = self._off, self._off.union(modules)
        try:
            with hooks_removed(self._off - former):
                yield
        finally:
            self._off = former

    def look(self) -> None:
        """Looks for hooks; on fakes."""
        hooked = list(filter(has_gradient_hooks, self._every))
        found = {each for each in hooked if self._can_be_lifted(each)}
        self.modules = found | (self.modules & self._off)
        self._number = number_of_hooks_ever()

    def inside(self, modules: Iterable[nn.Module]) -> set[nn.Module]:
        """Returns those among some modules."""
        return self.modules.intersection(modules) if self.modules else self.modules

    def _can_be_lifted(self, module: nn.Module) -> bool:
        """Whether the hooks on the backward pass of a module, which has some, can be lifted."""
        hooks = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
        if module._is_full_backward_hook is False or any(
            self._is_of_module(hook, module) for hook in hooks
        ):
            return False
        given = (torch.zeros(_ANY_SHAPE),)
        return not (
            any(asks(hook, module, given) for hook in module._backward_pre_hooks.values())
            or any(asks(hook, module, given, given) for hook in module._backward_hooks.values())
        )

    def _is_of_module(self, hook: Callable[..., Any], module: nn.Module) -> bool:
        """Whether a hook is code of its module, or of one around it, whose state it goes by."""
        return any(
            isinstance(each, nn.Module)
            and each not in self._roots
            and any(inner is module for inner in each.modules())
            for each in _held_by(hook)
        )


def _held_by(function: Any) -> Iterator[Any]:
    """Yields what a function holds itself."""
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    yield getattr(function, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def has_gradient_hooks(module: nn.Module) -> bool:
    """Whether somebody has put hooks on the backward pass of a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextlib.contextmanager
def hooks_removed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules have no hooks on their backward passes."""
    tables = [vars(each)[name] for each in modules for name in _TABLES]
    former = [dict(each) for each in tables]  # whoever takes one off has the table itself
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, former, strict=True):
            hooks.update(table)
            table.clear()
            table.update(hooks)


@contextlib.contextmanager
def lifted(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, a module that stays whole runs without what was lifted out of it.

    Args:
        modules: in it, whose hooks were.
    """
    register = torch.Tensor.register_hook

    def register_others(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if forward_hook_of() is not None:
            return RemovableHandle(collections.OrderedDict())
        handle: RemovableHandle = register(tensor, hook)  # type: ignore[no-untyped-call]
        return handle

    torch.Tensor.register_hook = register_others  # type: ignore[method-assign]
    try:
        with hooks_removed(modules):
            yield
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]


def forward_hook_of() -> nn.Module | None:
    """Returns the module whose call is the innermost one, if it is in one of its forward hooks."""
    callee = sys._getframe(1)
    while (caller := callee.f_back) is not None:
        if caller.f_code.co_qualname.startswith(_CALLS):
            module: nn.Module = caller.f_locals["self"]
            hooks = module._forward_hooks.values()
            return module if any(code_of(each) is callee.f_code for each in hooks) else None
        callee = caller
    return None


class _Numbers(TorchFunctionMode):
    """Gives numbers that nobody can look at yet."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.item:
            return PendingNumber(tensor=None, where="a hook")
        if func in SHOWING or func in MAKING_LISTS:
            raise UnsupportedError("it shows the numbers in a gradient")
        return func(*args, **(kwargs or {}))


def asks(hook: Callable[..., Any], *args: Any) -> bool:
    """Whether a hook asks for the value of a gradient, or changes what its module may go by.

    What it changes is put back.

    Args:
        hook: the hook.
        args: fakes of what it is given.
    """
    before = Snapshot([each for each in args if isinstance(each, nn.Module)], [hook])
    stays = False
    try:
        with _Numbers(), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            hook(*args)
    except (UnsupportedError, *DATA_DEPENDENT):
        stays = True
    except Exception:
        stays = False  # it will say so where it is lifted to
    finally:
        changes = before.note_changes()
        for growth in before.put_back():
            growth.remove()
    # A tensor that it keeps in an attribute of the module is for others to read.
    own = (each.now for each in changes if each.owner and each.owner.attribute not in OF_MODULES)
    return stays or not all(isinstance(each, torch.Tensor) for each in own)
