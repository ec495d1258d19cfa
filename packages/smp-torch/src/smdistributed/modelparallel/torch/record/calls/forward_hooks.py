"""Forward hooks of modules that stay whole, which are lifted out of these.

What a forward hook stores (norms in a list, sums, histograms, a running maximum) is for others to
read, on every rank; a module that stays whole runs on one. So a hook that returns nothing, and
changes nothing that a module around it goes by, is *lifted out*: it runs as code between modules
does, behind the call of the module that stays whole, on fakes of what it would have been given
(``record.calls.outside``). The module runs without it.

Which hooks are is found out once, by a trial of each. All others are part of their module: those
that change what it computes, keep what it reads, or only look (an assertion), which the rank of the
module does with real tensors.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from smdistributed.modelparallel.torch.compat.private.backward import number_of_hooks_ever
from smdistributed.modelparallel.torch.state.reach import is_users
from smdistributed.modelparallel.torch.state.switches import Settings

_TABLES = ("_forward_pre_hooks", "_forward_hooks")


class Spot(NamedTuple):
    """Where a hook is: hooks of one code on one module are one kind.

    Attributes:
        module: that has it.
        table: before its forward or behind it.
        code: that it runs first.
    """

    module: nn.Module
    table: str
    code: types.CodeType


#: The hooks on some modules in their order, and which of them are lifted out.
Signature = tuple[tuple[Spot, bool], ...]


class ForwardHook:
    """One that a script has registered.

    Args:
        spot: where it is.
        function: the script's.
        listener: makes the call; given the hook and its arguments.
    """

    def __init__(
        self,
        spot: Spot,
        function: Callable[..., Any],
        listener: Callable[[ForwardHook, Any, Any], Any],
    ) -> None:
        self.spot = spot
        self.function = function
        self._listener = listener
        # Code that looks for what modules reach finds the script's function in it.
        self.stand_in = functools.update_wrapper(functools.partial(self._call, function), function)

    def _call(self, _: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._listener(self, args, kwargs)


class HookCall(NamedTuple):
    """The call of a hook that is lifted out of the call of a module that stays whole.

    Attributes:
        spot, position: which one it is, among those of the spot: a script may put the same there in
            each step.
        args, kwargs: what it is given.
        settings: under which.
        start: of what the module calls, how much it has called before.
    """

    spot: Spot
    position: int
    args: Any
    kwargs: Any
    settings: Settings
    start: int


class ForwardHooks:
    """The forward hooks of a model's modules, of which some are lifted out.

    Args:
        modules: of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._listener: Callable[[ForwardHook, Any, Any], Any] | None = None
        self._number = -1
        self._known: dict[tuple[int, str, int], ForwardHook] = {}
        self._of: dict[nn.Module, list[tuple[int, ForwardHook]]] = {}
        self._is_lifted: dict[Spot, bool] = {}

    @contextlib.contextmanager
    def intercepted(self, listener: Callable[[ForwardHook, Any, Any], Any]) -> Iterator[None]:
        """Inside, a listener makes the calls of hooks."""
        self._listener = listener
        self._of, self._number = {}, -1
        try:
            self.follow()
            yield
        finally:
            self._listener = None
            for module, hooks in self._of.items():
                for key, hook in hooks:
                    table = vars(module)[hook.spot.table]
                    if table.get(key) is hook.stand_in:
                        table[key] = hook.function
            live = {id(hook) for hooks in self._of.values() for _, hook in hooks}
            self._known = {key: hook for key, hook in self._known.items() if id(hook) in live}

    def follow(self) -> None:
        """Takes hooks, too, that were registered since."""
        if self._listener is None or self._number == number_of_hooks_ever():
            return
        self._number = number_of_hooks_ever()
        for module in self._modules:
            for name in _TABLES:
                for key, function in vars(module)[name].items():
                    self._take(module, name, key, function)

    def _take(self, module: nn.Module, table: str, key: int, function: Any) -> None:
        own = (id(module), table, key)
        known = self._known.get(own)
        if known is None or (function is not known.function and function is not known.stand_in):
            code = code_of(function)
            if code is None or not is_users(_module_of(function)):
                return
            known = ForwardHook(Spot(module, table, code), function, self._called)
            self._known[own] = known
        if function is not known.stand_in:
            vars(module)[table][key] = known.stand_in
            self._of.setdefault(module, []).append((key, known))

    def _called(self, hook: ForwardHook, args: Any, kwargs: Any) -> Any:
        assert self._listener is not None
        return self._listener(hook, args, kwargs)

    def on(self, modules: Iterable[nn.Module]) -> Iterator[ForwardHook]:
        """Yields the hooks on some modules that are not taken off."""
        if self._of:
            for module in modules:
                for key, hook in self._of.get(module, ()):
                    if vars(module)[hook.spot.table].get(key) is hook.stand_in:
                        yield hook

    def at(self, spot: Spot) -> list[ForwardHook]:
        """Returns the hooks at a spot, in their order."""
        return [hook for hook in self.on([spot.module]) if hook.spot == spot]

    def signature(self, modules: Sequence[nn.Module]) -> Signature:
        """Returns which hooks are on some modules."""
        if not self._of:
            return ()
        return tuple((hook.spot, bool(self.is_lifted(hook))) for hook in self.on(modules))

    def is_lifted(self, hook: ForwardHook) -> bool | None:
        """Whether a hook is lifted out; None if that is not known yet."""
        return self._is_lifted.get(hook.spot)

    def decide(self, hook: ForwardHook, is_lifted: bool) -> None:
        """Takes note of whether a hook is lifted out."""
        self._is_lifted[hook.spot] = is_lifted

    def lifted(self) -> list[ForwardHook]:
        """Returns those that are lifted out."""
        return [hook for hook in self.on(self._of) if self.is_lifted(hook)]


@contextlib.contextmanager
def hooks_off(spots: Sequence[Spot]) -> Iterator[None]:
    """Inside, the hooks at some spots are not on their modules."""
    tables = {id(table): table for each in spots for table in [vars(each.module)[each.table]]}
    codes = {each.code for each in spots}
    former = [dict(table) for table in tables.values()]
    for table in tables.values():
        for key, function in list(table.items()):
            if code_of(function) in codes:
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables.values(), former, strict=True):
            hooks.update(table)
            table.clear()
            table.update(hooks)


def code_of(function: Any) -> types.CodeType | None:
    """Returns the code that a call of a function runs first."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _module_of(function: Any) -> str:
    while hasattr(function, "func"):
        function = function.func
    return getattr(function, "__module__", "") or ""
