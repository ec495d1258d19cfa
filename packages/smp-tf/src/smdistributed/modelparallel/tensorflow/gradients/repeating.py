"""Values of another process that this one computes by itself, of variables that it asks for.

A process that reads a value alone, which its owner has not computed, has made the operations that
it is of with stand-ins. They are noted, until all processes come together next, and made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from smdistributed.modelparallel.tensorflow.compat.gradients import unrecorded
from smdistributed.modelparallel.tensorflow.compat.operations import Again, unnoted
from smdistributed.modelparallel.tensorflow.parameters.moments import Moments
from smdistributed.modelparallel.tensorflow.parameters.owners import owner_of

_NAME = "_smp_made"


class _Made(NamedTuple):
    """How a value was made.

    Attributes:
        again: the operation.
        place: of the value among its results.
        since: see ``Moments``.
    """

    again: Again
    place: int
    since: int


def note_made(moments: Moments, results: Sequence[Any], again: Again) -> None:
    """Notes how values of another process are made, if it can be done again."""
    if all(_is_known(moments, each) for each in _values_in(again.args)):
        for place, result in enumerate(results):
            setattr(result, _NAME, _Made(again, place, moments.since))


def can_make_again(value: Any) -> bool:
    """Tells whether ``made_again`` has the numbers of a value, if variables are told."""
    owner: Any = owner_of(value)
    return owner.number is not None or _NAME in value.__dict__


def made_again(value: Any, told: Callable[[Any], Any]) -> Any:
    """Returns the numbers of a value of another process, computed here; None if that cannot be.

    Args:
        value: an eager tensor.
        told: returns the value of a variable, given what stands for it.
    """
    known: dict[int, Any] = {}
    try:
        with unnoted(), unrecorded():
            made = _again(value, told, known)
    except RecursionError:
        return None
    return None if made is None else made.numpy()


def _again(value: Any, told: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    owner: Any = owner_of(value)
    if id(value) not in known:
        made = getattr(value, "__dict__", {}).get(_NAME)
        if owner.number is not None:
            known[id(value)] = told(value)
        elif made is None:
            return None
        else:
            args = _replaced(made.again.args, lambda each: _again(each, told, known))
            results = made.again.make(args)
            is_list = isinstance(results, (list, tuple))
            known[id(value)] = results[made.place] if is_list else results
    return known[id(value)]


def _is_known(moments: Moments, value: Any) -> bool:
    """Tells whether an argument of an operation can be had again in this process."""
    owner = owner_of(value)
    if owner is None:
        return True
    if owner.variable is not None:  # a handle
        return False
    if owner.number is not None:
        return owner.moment >= moments.since
    made = value.__dict__.get(_NAME)
    return made is not None and made.since == moments.since


def _values_in(args: Any) -> Iterator[Any]:
    if isinstance(args, (list, tuple)):
        for each in args:
            yield from _values_in(each)
    else:
        yield args


def _replaced(args: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(args, (list, tuple)):
        return [_replaced(each, make) for each in args]
    return args if owner_of(args) is None else make(args)
