"""Steps whose Python is promised to be always the same: it runs now and then, as a check."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.trace.tree import EntryKind
from smdistributed.modelparallel.torch.stepping.batch import CallKind, MiniBatch, Recalled
from smdistributed.modelparallel.torch.stepping.lockstep import Lockstep
from smdistributed.modelparallel.torch.tensors.nested import same, template, value_paths

#: The Python of a static step runs in one of so many calls of a kind.
CHECKED_EVERY = 100
#: Kinds of calls that are remembered.
_MOST_KEPT = 16
#: What depends on the data of a step, or is told to the user's code in each.
_ASKING = (EntryKind.QUESTION, EntryKind.NUMBER)


@dataclass
class _Kept:
    """A kind of call, and what its microbatches did.

    Attributes:
        kind: of the call.
        arguments: of the call, without tensors and models.
        passed: its microbatches.
        calls: since the Python ran.
    """

    kind: CallKind
    arguments: Any
    passed: list[Passed]
    calls: int = 0

    def again(self) -> list[Passed]:
        """Returns the microbatches of a new call; tensors of their own are read anew."""
        self.calls += 1
        return [replace(each, constants=each.constants.again()) for each in self.passed]


class StaticPasses:
    """Stands before the lockstep of one step function, and leaves out what is known.

    Args:
        lockstep: runs the Python.
        name: of the step function, for messages.
    """

    def __init__(self, lockstep: Lockstep, name: str) -> None:
        self._lockstep = lockstep
        self._name = name
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._numbers = itertools.count()

    def let_go(self) -> None:
        """See ``Lockstep``."""
        self._kept.clear()
        self._lockstep.let_go()

    def recall(self, batch: MiniBatch) -> Recalled | None:
        """Returns the call that this one is like, if there is one; on rank 0 of the pipeline."""
        number = self._find(batch)
        if number is None:
            return None
        return Recalled(number, is_checked=self._kept[number].calls + 1 >= CHECKED_EVERY)

    def passes(self, batch: MiniBatch) -> list[Passed]:
        """Returns what all microbatches do. Collective: PP_GROUP; in a first call WORLD.

        Raises:
            SMPError: the Python did something else than before.
            Exception: the user's.
        """
        recalled = batch.header.recalled
        if recalled is not None and not recalled.is_checked:
            return self._kept[recalled.number].again()
        passed = self._lockstep.passes(batch)
        if recalled is not None:
            self._check(self._kept[recalled.number], passed)
        elif not _has_objects(batch.given) and not any(map(_depends_on_data, passed)):
            kept = _Kept(batch.header.kind, _kept_of(batch.given), passed)
            self._kept[next(self._numbers)] = kept
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return passed

    def _find(self, batch: MiniBatch) -> int | None:
        arguments = _kept_of(batch.given)
        for number, kept in self._kept.items():
            if kept.kind == batch.header.kind and same(kept.arguments, arguments, operator.is_):
                return number
        return None

    def _check(self, kept: _Kept, passed: Sequence[Passed]) -> None:
        """Makes sure that the Python did what it did before."""
        for position, (before, now) in enumerate(zip(kept.passed, passed, strict=True)):
            difference = _difference(before, now)
            if difference:
                raise SMPError(
                    f"step function {self._name} is declared static=True, so its Python must do "
                    f"the same in every call; {kept.calls + 1} calls ago microbatch {position} did "
                    f"{difference}. What it computed in between may be wrong: train "
                    "again from a checkpoint that is older, without static=True."
                )
        kept.calls = 0


def _depends_on_data(passed: Passed) -> bool:
    assert passed.way is not None
    return any(entry.kind in _ASKING for entry in passed.way.entries)


def _has_objects(obj: Any) -> bool:
    """Whether a structure has objects with state, which may change unseen."""
    found: list[Any] = []
    template(obj, lambda tensor: None, found.append)
    return bool(found)


def _kept_of(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Returns what is kept of the arguments of a call: no tensors, no models that would stay."""
    args, kwargs = given
    named = {name: _weakly(each) for name, each in kwargs.items()}
    return template((tuple(map(_weakly, args)), named), lambda tensor: None, lambda obj: obj)


def _weakly(argument: Any) -> Any:
    return weakref.ref(argument) if isinstance(argument, DistributedModel) else argument


def _difference(before: Passed, now: Passed) -> str:
    """Returns in which two microbatches differ; empty if they did the same."""
    assert before.way is not None
    assert now.way is not None
    # The trace may have been forgotten, and written anew.
    if before.way is not now.way and before.graph.digest() != now.graph.digest():
        pairs = zip(before.way.entries, now.way.entries, strict=False)
        one, other = next(
            (pair for pair in pairs if str(pair[0]) != str(pair[1])), ("less", "more")
        )
        return f"go on with {one}, and now with {other}"
    if not before.constants.made_alike(before.graph.constants, now.constants, now.graph.constants):
        return "make other tensors of numbers or arrays than now"
    returned, now_returned = dict(value_paths(before.result)), dict(value_paths(now.result))
    if not same(returned, now_returned, operator.is_):
        return f"return {list(returned.values())} and now {list(now_returned.values())}"
    return ""
