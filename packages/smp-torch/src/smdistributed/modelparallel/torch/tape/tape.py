"""What is on a tape."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.tape.settings import Settings
from smdistributed.modelparallel.torch.tensors.nested import (
    fill,
    opaque_objects,
    placeholders,
)
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

#: Arguments that are neither tensors nor plain values, and have no state of their own.
_SAME_IN_EVERY_PASS = (type, types.FunctionType, types.BuiltinFunctionType, nn.Module)


class Made(NamedTuple):
    """Stands for a tensor of the pass: what it is given comes first, then what calls make."""

    number: int


class Earlier(NamedTuple):
    """Stands for a tensor that an earlier pass of the microbatch left in an object."""

    tape: Tape
    number: int


class OnHost:
    """Stands for a tensor that is not on the device: its numbers are a constant of the tape."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def is_like(self, other: object) -> bool:
        """Whether something is a tensor with the same numbers, which has the same history."""
        own = self.tensor
        return (
            isinstance(other, torch.Tensor)
            and type(other) is type(own)
            and (other.device, other.dtype, other.requires_grad) == (own.device, own.dtype, False)
            and other.stride() == own.stride()
            and torch.equal(own, other)
        )


class Own(NamedTuple):
    """Stands for an object of this library that each pass makes for itself."""

    kind: type
    number: int


#: What stands for what each pass has for itself; tensors from outside stand for themselves.
REFERENCES = (Made, Earlier, OnHost, Own)


@dataclass(eq=False, slots=True)
class Call:
    """A call of a function of torch.

    Attributes:
        function: that was called.
        args, kwargs: templates.
        settings: under which.
        computes: something may be computed in it; else it gives views, or says how tensors look.
        result: template of what it gave.
        is_fixed: nobody can change what it gave.
        is_asked_again: it asks about tensors from outside, which may be others now.
        is_known: it asks for numbers that are the same in every pass, or that are asked for ahead,
            and is not made again.
        is_asked_ahead: it is found before the pass whether they are the same; see ``answers``.
        numbers: what it gives if that is made of numbers of the host: nothing comes from there
            while a graph is captured, so it is copied.
        inside: of a module that runs as compiled code, what its Python calls as it is written.
        written: templates of the tensors that it writes to.
        draws: it draws random numbers.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    settings: Settings
    computes: bool = True
    result: Any = None
    is_fixed: bool = True
    is_asked_again: bool = False
    is_known: bool = False
    is_asked_ahead: bool = False
    numbers: torch.Tensor | None = None
    inside: Any = None
    written: tuple[Any, ...] = ()
    draws: bool = False


@dataclass(eq=False, slots=True)
class DrawBegins:
    """Random numbers have a key from here on.

    Attributes:
        key: of the numbers.
        lane: whose they are.
        on_host: some were drawn on the host.
        drew: numbers were drawn, as far as anybody asked.
    """

    key: tuple[str, int, int]
    lane: int
    on_host: bool = False
    drew: bool = False


@dataclass(eq=False, slots=True)
class DrawEnds:
    """They have the one that they had before."""


@dataclass(eq=False, slots=True)
class CastsForgotten:
    """What autocast keeps of weights is not used again."""


@dataclass(eq=False, slots=True)
class RegionBegins:
    """What follows keeps no activations: it is computed again in the backward pass.

    Attributes:
        stops_early: no further than is needed.
        settings: under which it is called; in it, calls have their own.
    """

    stops_early: bool
    settings: Settings


@dataclass(eq=False, slots=True)
class RegionEnds:
    """What follows does not."""


Event = RegionBegins | RegionEnds | Call | DrawBegins | DrawEnds | CastsForgotten


@dataclass(eq=False)
class Tape:
    """What the Python of one pass called.

    Attributes:
        events: in order.
        specs: of its tensors, by their numbers.
        num_given: how many of them are given to the pass.
        results: template of what the pass gives.
        outside: tensors that were neither given nor made, by identity.
        on_host: functions of torch that were called without tensors of the device.
        refusal: why the pass cannot be done from its tape; "" if it can.
        kept: the numbers of tensors that later passes of the microbatch use.
        ahead: the positions of calls that are asked ahead of the pass, and of what they are made
            from.
        compiler: the backend of compiled modules of which it has the calls; None: of none. What
            lies between these is compiled by it where the pass is computed from the tape.
    """

    events: list[Event] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    num_given: int = 0
    results: Any = ()
    outside: dict[int, torch.Tensor] = field(default_factory=dict)
    on_host: set[Any] = field(default_factory=set)
    refusal: str = ""
    kept: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)
    compiler: Any = None

    def refuse(self, why: str) -> None:
        """Takes note of the first reason why the pass cannot be done from its tape."""
        self.refusal = self.refusal or why

    def last_uses(self) -> dict[int, int]:
        """Returns, by the numbers of tensors, the position of the last event that uses each."""
        last: dict[int, int] = {}
        for position, event in enumerate(self.events):
            if isinstance(event, Call):
                for number in numbers_in((event.args, event.kwargs, event.result)):
                    last[number] = position
        for number in (*numbers_in(self.results), *self.kept):
            last[number] = len(self.events)
        return last

    @property
    def has_regions(self) -> bool:
        """Whether something is computed again in the backward pass."""
        return any(isinstance(each, RegionBegins) for each in self.events)


def has_state(obj: Any) -> bool:
    """Whether a structure holds an object with state of its own, as a cache."""
    return any(not isinstance(each, _SAME_IN_EVERY_PASS) for each in opaque_objects(obj))


def filled(template: Any, of_tape: Callable[[Made | Earlier | Own], Any]) -> Any:
    """Returns a structure of its template, with tensors in it.

    Args:
        template: the template.
        of_tape: gives what a reference stands for.
    """

    def value(reference: Made | Earlier | OnHost | Own) -> Any:
        return reference.tensor if isinstance(reference, OnHost) else of_tape(reference)

    return fill(template, REFERENCES, value)


def numbers_in(template: Any) -> Iterator[int]:
    """Yields the numbers of the pass's own tensors in a template."""
    return (each.number for each in placeholders(template, Made))
