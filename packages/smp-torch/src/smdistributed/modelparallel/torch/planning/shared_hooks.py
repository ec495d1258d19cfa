"""Hooks that one backward pass of one process shares, and several passes of a pipeline do not.

In one process a microbatch has one backward pass, which reaches all parameters: a hook of several
gets all of their gradients, and hooks of single ones may count each other, or collect gradients
until the last has come. In a pipeline each segment has a backward pass of its own. So hooks are
exact where those that belong together are reached by one pass; else they are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor, gradients_hidden
from smdistributed.modelparallel.torch.compat.private.distributed import collectives_seen
from smdistributed.modelparallel.torch.compat.private.modes import (
    TorchDispatchMode,
    past_function_modes,
    pytree,
)
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.planning.final_gradients import parameters_of
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.record.leaves.gradient_hooks import GradientHook, Moment
from smdistributed.modelparallel.torch.state.python_random import python_random_kept
from smdistributed.modelparallel.torch.state.snapshot import Place, Snapshot
from smdistributed.modelparallel.torch.tensors.written import written_by

_FIX = (
    "Put hooks that belong together on parameters of one module, or the modules on one partition; "
    "or do it after the call of the step function, where gradients of all partitions can be used: "
    "smp.clip_grad_norm_, or the norm over model.parameters(), made a number by float() once, on "
    "every rank."
)
#: Segments whose backward passes reach a parameter.
_Passes = frozenset[int]
_PassesOf = Mapping[torch.Tensor, _Passes]


def check_shared_hooks(plan: Plan, hooks: Sequence[GradientHook]) -> None:
    """Raises where hooks see gradients in one process that no pass of a pipeline has together.

    Args:
        plan: of a microbatch.
        hooks: the user's.

    Raises:
        UnsupportedError: hooks share what several passes would have to.
    """
    passes = _passes_of(plan, hooks)
    _check_several(hooks, passes)
    reached = [each for each in hooks if passes[each.parameter]]
    if len(_all_of(passes, reached)) > 1:
        _SharedState(reached, passes).check()


def _passes_of(plan: Plan, hooks: Sequence[GradientHook]) -> _PassesOf:
    reached: dict[torch.Tensor, set[int]] = {}
    for index in plan.backward if hooks else ():
        nodes = [node for node in plan.segments[index].nodes if node in plan.differentiated]
        for parameter in parameters_of(nodes):
            reached.setdefault(parameter, set()).add(index)
    return {each.parameter: frozenset(reached.get(each.parameter, ())) for each in hooks}


def _all_of(passes: _PassesOf, hooks: Iterable[GradientHook]) -> _Passes:
    return frozenset[int]().union(*(passes[each.parameter] for each in hooks))


def _check_several(hooks: Sequence[GradientHook], passes: _PassesOf) -> None:
    """Makes sure that what a function gets together comes in one backward pass."""
    groups: dict[int, list[GradientHook]] = {}
    for hook in hooks:
        if hook.several is not None:
            groups.setdefault(id(hook.several.key), []).append(hook)
    for group in groups.values():
        several = group[0].several
        assert several is not None
        names = ", ".join(each.name for each in group)
        if len(_all_of(passes, group)) > 1:
            raise UnsupportedError(
                f"{_said(group[0])} is to get the gradients of {names} in one backward pass "
                "(torch.autograd.graph.register_multi_grad_hook), and a pipeline reaches them in "
                f"several, each on the rank that has the module. {_FIX}"
            )
        if several.number > len(group):
            raise UnsupportedError(
                f"{_said(group[0])} is to get the gradients of {names} and of "
                f"{several.number - len(group)} tensors that are no parameters of the model, in "
                "one backward pass (torch.autograd.graph.register_multi_grad_hook): in a pipeline "
                f"these have none there. {_FIX}"
            )


class _SharedState:
    """What hooks of several passes keep for each other: they are tried out.

    Args:
        hooks: in the order of the parameters.
        passes: that reach the parameters, by name.
    """

    def __init__(self, hooks: Sequence[GradientHook], passes: _PassesOf) -> None:
        self._parameters = [each.parameter for each in _once(hooks)]
        #: The first of hooks that belong together, and all of them.
        self._together: dict[GradientHook, list[GradientHook]] = {}
        #: Hooks by the passes that run them; a pass comes to the last parameter first.
        self._groups: dict[_Passes, list[GradientHook]] = {}
        firsts: dict[int, GradientHook] = {}
        for each in reversed(hooks):
            first = each if each.several is None else firsts.setdefault(id(each.several.key), each)
            self._together.setdefault(first, []).append(each)
            if first is each:
                self._groups.setdefault(passes[each.parameter], []).append(each)

    def check(self) -> None:
        """Raises if what a hook does depends on hooks of other passes, or changes what they see.

        Raises:
            UnsupportedError: it does.
        """
        with self._apart():
            together = _Tried(self, list(self._together))
            for group in self._groups.values():
                others = [each for each in self._together if each not in group]
                alone = _Tried(self, group)
                seen = self.snapshot(others)
                for hook in group:
                    if (path := alone.changed(hook, seen)) is not None:
                        raise self._refusal(hook, others, f"changes {path}, which it shares with")
                    if not _same(together.outcomes[hook], alone.outcomes[hook]):
                        raise self._refusal(hook, others, "goes by what it shares with")

    def _refusal(
        self, hook: GradientHook, others: Sequence[GradientHook], deed: str
    ) -> UnsupportedError:
        theirs = [one.name for each in others for one in self._together[each]]
        names = ", ".join(dict.fromkeys(theirs))
        return UnsupportedError(
            f"{_said(hook)}, a hook on the gradient of {hook.name}, {deed} hooks of {names}: in "
            "one process one backward pass runs them, and a pipeline has several, each on the rank "
            f"that has the module. {_FIX}"
        )

    def snapshot(self, hooks: Iterable[GradientHook]) -> Snapshot:
        """Returns the Python state that hooks can see, without the parameters of the model."""
        own = set(map(id, self._parameters))
        return Snapshot((), [each.function for each in hooks], moved=own)

    def call(self, hook: GradientHook, writes: _Writes) -> Any:
        """Returns what a hook gives, and leaves of what it is given."""
        gradients = [_like(each.parameter) for each in self._together[hook]]
        parameter = nn.Parameter(_like(hook.parameter)) if hook.moment is Moment.AFTER else None
        if parameter is not None:
            parameter.grad = gradients[0]
        given: dict[Moment, tuple[Any, ...]] = {
            Moment.GRADIENT: (gradients[0],),
            Moment.BEFORE: ((gradients[0],),),
            Moment.AFTER: (parameter,),
            Moment.BEHIND: ((), (gradients[0],)),
        }
        takes_all = hook.several is not None and hook.several.number
        writes.allow([*gradients, parameter])
        try:
            with _seeded(gradients[0].device), torch.no_grad(), writes:
                result = hook.function(*((gradients,) if takes_all else given[hook.moment]))
        except Exception as error:
            result = type(error).__name__
        left = None if parameter is None else parameter.grad
        return [each for each in (result, *gradients, parameter, left) if each is not None]

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, hooks find no gradients but those that they are given, and exchange nothing."""

        def refuse(name: str, group: object) -> None:
            raise UnsupportedError(f"{name} is called where hooks are tried out")

        with past_function_modes():
            gradients = [each.grad for each in self._parameters]
            for each in self._parameters:
                each.grad = None
        try:
            with gradients_hidden(), python_random_kept(), collectives_seen(refuse):
                yield
        finally:
            with past_function_modes():
                for each, gradient in zip(self._parameters, gradients, strict=True):
                    each.grad = gradient


class _Tried:
    """What hooks do, one after the other; leaves no trace.

    Args:
        state: calls them.
        hooks: in the order of a backward pass.

    Attributes:
        outcomes: what each gave.
    """

    def __init__(self, state: _SharedState, hooks: Sequence[GradientHook]) -> None:
        self.outcomes: dict[GradientHook, Any] = {}
        #: What each was the first to change besides adding to it: where, and its name.
        self._changed: dict[GradientHook, dict[Place, str]] = {}
        self._written: dict[GradientHook, set[int]] = {}
        known: set[Place] = set()
        before, writes = state.snapshot(hooks), _Writes()
        try:
            for hook in hooks:
                self.outcomes[hook] = _copied(state.call(hook, writes))
                changes = [each for each in before.note_changes() if each.added is None]
                found = {place: each.path for each in changes for place in each.places - known}
                self._changed[hook], self._written[hook] = found, writes.taken()
                known |= found.keys()
        finally:
            before.note_changes()
            for growth in before.put_back():
                growth.remove()

    def changed(self, hook: GradientHook, seen: Snapshot) -> str | None:
        """Returns what a hook changes of what others see, by its name."""
        places = seen.places()
        if any(storage_of(each) in self._written[hook] for each in seen.tensors()):
            return "a tensor"
        return next((path for at, path in self._changed[hook].items() if at in places), None)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to what was there before, and notes them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, torch.Tensor] = {}  # by their memory, which none else gets meanwhile
        self._refused: set[int] = set()

    def allow(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Lets tensors be written to."""
        self._made.update((storage_of(each), each) for each in tensors if each is not None)

    def taken(self) -> set[int]:
        """Returns the memories that something would have written to since."""
        found, self._refused = self._refused, set()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, unless it writes to what was there before."""
        kwargs = kwargs or {}
        memories = {storage_of(each) for each in written_by(func, args, kwargs)}
        if not memories <= self._made.keys():
            self._refused |= memories
            raise UnsupportedError(f"{func} writes to what is there already")
        result = func(*args, **kwargs)
        given = {storage_of(each) for each in _tensors((args, kwargs))}
        self.allow(each for each in _tensors(result) if storage_of(each) not in given)
        return result


@contextlib.contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Inside, torch draws the same numbers each time."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(0)
        yield


def _like(parameter: torch.Tensor) -> torch.Tensor:
    """Returns numbers like those of a parameter, the same each time."""
    with past_function_modes(), torch.no_grad():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return made.normal_(generator=torch.Generator(made.device).manual_seed(1))


def _once(hooks: Iterable[GradientHook]) -> list[GradientHook]:
    """Returns one hook of each parameter."""
    return list({id(each.parameter): each for each in hooks}.values())


def _said(hook: GradientHook) -> str:
    function = getattr(hook.function, "func", hook.function)
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _copied(outcome: Any) -> list[Any]:
    return [
        each.detach().clone() if isinstance(each, torch.Tensor) else each
        for each in pytree.tree_leaves(outcome)
    ]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two outcomes are the same; tensors by their numbers, else by what there is."""
    return len(one) == len(other) and all(map(_same_leaf, one, other))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, AbsentTensor) or isinstance(other, AbsentTensor):
        return True  # it is of another partition, whose rank sees whether they are
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and (not isinstance(one, str) or one == other)
