"""The calls that a step makes for the whole sequence, and what is known of them for a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, FakeTensorMode
from smdistributed.modelparallel.torch.context_parallel.actions import Action
from smdistributed.modelparallel.torch.context_parallel.calls import (
    Call,
    Makers,
    put_together,
    results_of,
    taken_apart,
)
from smdistributed.modelparallel.torch.context_parallel.layout import Layout
from smdistributed.modelparallel.torch.context_parallel.refusals import refused
from smdistributed.modelparallel.torch.context_parallel.seeing import RunMode
from smdistributed.modelparallel.torch.tensors.functions import (
    BACKWARD,
    HOOKING_GRADIENTS,
)
from smdistributed.modelparallel.torch.trial.on_fakes import Trial

#: Who has made the arguments of the step function.
ARGUMENTS = -1


@dataclass(frozen=True)
class Held:
    """What a rank has of a tensor.

    Attributes:
        whole: shape of the whole.
        layout: how it is cut, or could be; None if that is not known.
        is_piece: whether this rank has a piece.
    """

    whole: torch.Size
    layout: Layout | None = None
    is_piece: bool = False


@dataclass
class OfWholeSequence:
    """A call as it was made for the whole.

    Attributes:
        call: what was called.
        results: shapes of the tensors that it gave.
        outside: the tensors in its arguments that no call before has made, by their numbers; they
            are kept until the call is proven.
    """

    call: Call
    results: tuple[torch.Size, ...]
    outside: dict[int, torch.Tensor]


@dataclass(frozen=True)
class Proven:
    """A call as it is made for a piece.

    Attributes:
        call: what is called.
        action: what is done.
        results: what this rank has of each result.
    """

    call: Call
    action: Action
    results: tuple[Held, ...]


@dataclass
class Way:
    """The calls of one microbatch, in order.

    Attributes:
        wholes: as they are for the whole.
        proven: as they are for a piece, as far as that is known.
        given: the whole numbers among what the body gave.
    """

    wholes: list[OfWholeSequence] = field(default_factory=list)
    proven: list[Proven] = field(default_factory=list)
    given: tuple[int, ...] = ()


class Made:
    """Which call has made which tensor of a run."""

    def __init__(self) -> None:
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def by(self, tensor: torch.Tensor) -> Makers:
        """Returns who has made a tensor; nobody, if it was there before."""
        found: Makers = self._made.get(tensor, frozenset())  # type: ignore[no-untyped-call]
        return found

    def note(self, tensor: torch.Tensor, call: int, result: int) -> None:
        """Takes note that a call has given a tensor, which it may have been given itself."""
        self._made[tensor] = self.by(tensor) | {(call, result)}


class NumbersNeededError(Exception):
    """A tensor has no numbers, and one with numbers is written to by it."""


class WholeRun(RunMode):
    """Writes down the calls of a step that is tried with whole sequences.

    What parameters meet is too large for one rank, and is not needed: the logits of a sequence may
    be larger than all that the rank keeps of its piece. From there on tensors are fakes.

    Args:
        arguments: tensors of the step function.
        fake_mode: of fakes; None if all tensors are to have numbers.
    """

    def __init__(self, arguments: list[torch.Tensor], fake_mode: FakeTensorMode | None) -> None:
        super().__init__()
        self.way = Way()
        self._made = Made()
        self._fake_mode = fake_mode
        self._fakes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for number, each in enumerate(arguments):
            self._made.note(each, ARGUMENTS, number)

    def take(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call, and writes it down."""
        if function in BACKWARD:
            return None  # nothing is differentiated
        if function in HOOKING_GRADIENTS:
            raise refused(
                function.__qualname__,
                "gives code to the backward pass, which would see pieces of gradients",
            )
        call, tensors = call_of(function, args, kwargs, self._made)
        # What a call has been given is taken down first: it may write to it.
        outside = {
            number: tensor for number, tensor in enumerate(tensors) if not call.makers[number]
        }
        with self.aside():
            if any(isinstance(each, nn.Parameter | FakeTensor) for each in tensors):
                result = self._without_numbers(function, call, tensors)
            else:
                result = function(*args, **kwargs)
        results = results_of(result)
        for number, each in enumerate(results):
            self._made.note(each, len(self.way.wholes), number)
        shapes = tuple(each.shape for each in results)
        self.way.wholes.append(OfWholeSequence(call, shapes, outside))
        return result

    def _without_numbers(
        self, function: Callable[..., Any], call: Call, tensors: Sequence[torch.Tensor]
    ) -> Any:
        if self._fake_mode is None:
            args, kwargs = put_together(call.spec, call.leaves, tensors)
            return function(*args, **kwargs)
        fakes = [self._fake(self._fake_mode, each) for each in tensors]
        args, kwargs = put_together(call.spec, call.leaves, fakes)
        if function is torch.Tensor.__getitem__ and not kwargs:
            args = self._with_places(args, tensors, fakes)
        with self._fake_mode, Trial() as trial:
            result = function(*args, **kwargs)
        for tensor, fake in zip(tensors, fakes, strict=True):
            if fake is not tensor and trial.has_written(fake):
                raise NumbersNeededError
        return result

    def _with_places(
        self, args: Any, tensors: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor]
    ) -> Any:
        """Returns an indexing with places for masks: their numbers say how many are chosen."""
        assert self._fake_mode is not None
        real = {id(fake): tensor for fake, tensor in zip(fakes, tensors, strict=True)}
        found: list[Any] = []
        for each in args[1] if isinstance(args[1], tuple) else (args[1],):
            mask = real.get(id(each))
            if mask is None or mask.dtype != torch.bool or isinstance(mask, FakeTensor):
                found.append(each)
                continue
            for places in mask.nonzero(as_tuple=True):
                with self._fake_mode:
                    found.append(torch.empty(places.shape, dtype=places.dtype, device=mask.device))
        return args[0], tuple(found)

    def _fake(self, mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake of a tensor, which of a sharded parameter is that of the whole."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self._fakes:
            with mode:
                self._fakes[tensor] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
        fake: torch.Tensor = self._fakes[tensor]
        return fake


def call_of(
    function: Callable[..., Any], args: Any, kwargs: Any, made: Made
) -> tuple[Call, list[torch.Tensor]]:
    """Returns a call, and the tensors in its arguments."""
    spec, leaves, tensors = taken_apart(args, kwargs)
    shapes = tuple((each.shape, each.dtype) for each in tensors)
    makers = tuple(made.by(each) for each in tensors)
    kinds = tuple(map(type, leaves))
    return Call(function, spec, tuple(leaves), kinds, shapes, makers), tensors
