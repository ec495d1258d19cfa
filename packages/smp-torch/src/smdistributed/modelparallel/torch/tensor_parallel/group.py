"""What a distributed module knows of the job that it runs in."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.torch.collectives.alike import AsIfAlike
from smdistributed.modelparallel.torch.collectives.interface import Collectives, Sizes
from smdistributed.modelparallel.torch.collectives.shapes import is_fake
from smdistributed.modelparallel.torch.collectives.streams import ExchangeStream
from smdistributed.modelparallel.torch.compat.between import when_real
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.tensor_parallel.backward_passes import BackwardPasses
from smdistributed.modelparallel.torch.tensor_parallel.words import Moment, Words


class Lanes(Protocol):
    """The random numbers of the step in progress, for the examples of each rank of the group."""

    @property
    def is_active(self) -> bool:
        """Whether a step is in progress."""

    def as_lane(self, lane: int) -> contextlib.AbstractContextManager[object]:
        """Inside, the draw in progress is the one that another rank makes for its examples."""

    def place(self) -> Any:
        """Returns how many calls and draws there have been."""

    def owns_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether a hook of a module does nothing but key its random numbers."""

    def computing_for(self, lane: int, place: Any) -> contextlib.AbstractContextManager[object]:
        """Inside, calls and draws are those that another rank makes, counted from a place."""


#: Masks of examples, where there are any.
Masks = Sequence[torch.Tensor | None]
#: Most dims of a mask, that of the examples left out.
_MOST_DIMS = 3
#: That one number of a word has room for.
_FLAGS_IN_ONE = 32
#: Gives a group. What a step is recorded from may hold functions, but no objects with state.
Handle = Callable[[], "TensorGroup"]


@dataclass(frozen=True)
class _Known:
    """What the ranks know of each other in a call.

    Attributes:
        sizes: the examples of each rank.
        all_can_slice: whether each of them can compute in slices.
        needs_gradient: whether the examples of one of them need a gradient.
    """

    sizes: tuple[int, ...]
    all_can_slice: bool
    needs_gradient: bool


class TensorGroup:
    """The ranks that split a module between them.

    Each of them brings its own examples, and leaves with the results of these. With a prescaled
    batch all bring the same ones.

    Args:
        collectives: between the ranks; None where there is one.
        random: the random numbers of the step; None without a job.
        is_prescaled: the ranks bring the same examples.
        keeps_gathered: keep what was gathered for the backward pass, else gather it again.
        stream: where the exchanges run.
        is_trial: nobody but this rank makes its calls, for their shapes.
    """

    def __init__(
        self,
        collectives: Collectives | None = None,
        random: Lanes | None = None,
        *,
        is_prescaled: bool = False,
        keeps_gathered: bool = True,
        stream: ExchangeStream | None = None,
        is_trial: bool = False,
    ) -> None:
        self._collectives = collectives
        self._is_trial = is_trial
        self.random = random
        self.size = 1 if collectives is None else collectives.size
        self.rank = 0 if collectives is None else collectives.rank
        self.is_prescaled = is_prescaled
        self.keeps_gathered = keeps_gathered
        self.stream = stream or ExchangeStream(torch.device("cpu"))
        self._known: list[_Known] = []
        #: What is said and compared; None where there is one rank.
        self.words: Words | None = None
        self.passes: BackwardPasses | None = None
        if collectives is not None:
            self.words = Words(collectives)
            self.passes = BackwardPasses(collectives, self.words, is_prescaled=is_prescaled)
        self._calling = ""
        #: The forms of calls that all ranks know, by a number for each; for ``auto``.
        self.known_calls: dict[int, Any] = {}

        def handle() -> TensorGroup:
            return self

        self.handle: Handle = handle

    def for_trials(self) -> TensorGroup:
        """Returns what stands for this group in calls that others do not make at the time."""
        if self.size == 1:
            return self
        return TensorGroup(
            AsIfAlike(self.size, self.rank),
            self.random,
            is_prescaled=self.is_prescaled,
            keeps_gathered=self.keeps_gathered,
            is_trial=True,
        )

    def makes_shapes(self, *tensors: torch.Tensor) -> bool:
        """Whether a call with tensors is made for the shapes of its results, by this rank alone."""
        return self._is_trial or any(map(is_fake, tensors))

    @property
    def share_of_gradient(self) -> float:
        """What a rank's examples count for in the gradient of a slice that sees all of them."""
        return 1.0 if self.is_prescaled else 1.0 / self.size

    def begin_step(self, seed: int) -> int:
        """Returns the seed that the first rank of the group gives. Collective: TP_GROUP."""
        return seed if self.words is None else self.words.say(Moment.BEGIN, "", [seed])[0][0]

    def recorded(self, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Returns the numbers of all ranks, which have recorded a step. Collective: TP_GROUP.

        Raises:
            SMPError: one of them still asks for values of activations.
        """
        if self.words is None:
            return [list(numbers)]
        return self.words.say(Moment.RECORDED, "", numbers)

    def ahead(self, names: Sequence[str]) -> None:
        """Says which modules are computed for a question about an activation. Collective: TP_GROUP.

        Raises:
            SMPError: other ranks ask for other values, or for none.
        """
        if self.words is None or not names:
            return
        told = ", ".join(names)
        number = zlib.crc32(told.encode())
        if any(each[0] != number for each in self.words.say(Moment.AHEAD, told, [number])):
            self.refuse(
                "must compute the same modules for what Python asks of activations, since they "
                "compute them together",
                told,
            )

    def end_step(self, flags: Sequence[bool]) -> list[bool]:
        """Returns which flags are set on any rank; all give as many. Collective: TP_GROUP."""
        if self.words is None:
            return list(flags)
        own = [
            sum(flag << place for place, flag in enumerate(flags[first : first + _FLAGS_IN_ONE]))
            for first in range(0, len(flags), _FLAGS_IN_ONE)
        ]
        everyones = self.words.say(Moment.END, "", own)
        return [
            any(each[place // _FLAGS_IN_ONE] >> place % _FLAGS_IN_ONE & 1 for each in everyones)
            for place in range(len(flags))
        ]

    def call(self, who: str, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers that all ranks call a module with. Collective: TP_GROUP.

        Args:
            who: is called.
            numbers: at most ``words.LENGTH``.
        """
        assert self.words is not None
        assert self.passes is not None
        everyones = self.words.say(Moment.CALL, who, numbers)
        self.passes.call()
        self._calling = who
        return everyones

    def exchanged(self, result: torch.Tensor, *, in_backward: bool = False) -> torch.Tensor:
        """Takes note of the result of an exchange, which has one of gradients; returns it.

        Args:
            result: of the exchange.
            in_backward: it is part of a backward pass that is differentiated.
        """
        if self.passes is not None:
            note = functools.partial(
                self.passes.note, name=self._calling, is_differentiated=in_backward
            )
            when_real(result, note)
        return result

    @contextlib.contextmanager
    def confirming(self, leave: Callable[[], None]) -> Iterator[None]:
        """Inside, Python confirms a pass; ``leave`` is called where another's goes another way."""
        if self.words is None:
            yield
            return
        self.words.leave = leave
        try:
            yield
        finally:
            self.words.leave = None

    def leave(self) -> None:
        """Says that the Python of this rank goes another way. Collective: TP_GROUP."""
        if self.words is not None:
            self.words.say(Moment.OTHER_WAY, "", [])

    def confirmed(self) -> None:
        """Says that it came to the end of a pass as recorded. Collective: TP_GROUP."""
        if self.words is not None:
            self.words.say(Moment.CONFIRMED, "", [])

    def like_others(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns own examples, which need a gradient if those of another rank do."""
        if tensor.requires_grad or not (self._known and self._known[-1].needs_gradient):
            return tensor
        return tensor.detach().requires_grad_()

    def everyones(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, as many from each. Collective: TP_GROUP."""
        return [list(numbers)] if self.size == 1 else self.collectives.compare(numbers)

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor of the first rank. Collective: TP_GROUP."""
        return tensor if self.size == 1 else self.collectives.from_first(tensor)

    def everyones_texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks. Collective: TP_GROUP."""
        return [text] if self.size == 1 else self.collectives.compare_texts(text)

    @contextlib.contextmanager
    def capturing(self, *, is_first: bool, is_last: bool) -> Iterator[None]:
        """Inside, a pass is captured, with its exchanges.

        Args:
            is_first: it is the first of those that are done one after the other.
            is_last: it is their last one.
        """
        if self.size == 1:
            yield
            return
        with self.stream.joined():
            if is_first:
                self.collectives.meet()
            yield
            if is_last:
                self.collectives.meet()

    @property
    def memory(self) -> object:
        """What exchanges use at present; captured ones need it as long as they are kept."""
        return None if self.size == 1 else self.collectives.memory

    @property
    def collectives(self) -> Collectives:
        """Between the ranks; there are several."""
        assert self._collectives is not None
        return self._collectives

    @property
    def all_can_slice(self) -> bool:
        """Whether each rank has said that it can compute the call in progress in slices."""
        return bool(self._known) and self._known[-1].all_can_slice

    @contextlib.contextmanager
    def examples(
        self,
        who: str,
        tensor: torch.Tensor,
        masks: Masks = (),
        about: str = "",
        *,
        can_slice: bool = False,
    ) -> Iterator[tuple[Sizes, list[torch.Tensor | None]]]:
        """Gives the number of examples of each rank, which a call of a module begins with.

        Ranks may differ in whether they have a mask: those without one get one of zeros where
        another has one. The modules inside a distributed module take what it has found.
        Collective: TP_GROUP.

        Args:
            who: calls, for messages.
            tensor: has the own examples along dim 0.
            masks: of these examples, along dim 0, of one number of dims on all ranks, or None.
            about: what the ranks must agree on besides the other sizes of ``tensor``.
            can_slice: whether this rank can compute the call in slices of its examples.

        Raises:
            SMPError: the ranks call different modules, or with tensors that do not fit together.
        """
        own = tensor.shape[0]
        found = list(masks)
        if self._known and self._known[-1].sizes[self.rank] == own:
            known = self._known[-1]
        elif self.size == 1 or self.makes_shapes(tensor):
            known = _Known((own,) * self.size, False, False)
        else:
            known, found = self._find(who, tensor, masks, about, can_slice)
        self._known.append(known)
        try:
            yield known.sizes, found
        finally:
            self._known.pop()

    @run_as_written
    def _find(
        self, who: str, tensor: torch.Tensor, masks: Masks, about: str, can_slice: bool
    ) -> tuple[_Known, list[torch.Tensor | None]]:
        own = tensor.shape[0]
        kind = f"{who} on examples of shape {tuple(tensor.shape[1:])}, {tensor.dtype}{about}"
        if not torch.is_grad_enabled():
            kind += ", without gradients"
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        numbers = [own, zlib.crc32(kind.encode()), int(can_slice), int(needs_gradient)]
        start = len(numbers)
        for mask in masks:
            numbers += _dims_of(mask)
        everyones = self.call(who, numbers)
        sizes = tuple(each[0] for each in everyones)
        if any(each[1] != numbers[1] for each in everyones):
            self.refuse("must call the same distributed modules in the same way", kind)
        if self.is_prescaled and len(set(sizes)) > 1:
            self.refuse(
                "must bring the same examples, as prescaled_batch is on", f"{own} examples: {kind}"
            )
        common = []
        for place, mask in enumerate(masks):
            first = start + place * (_MOST_DIMS + 1)
            theirs = [each[first : first + _MOST_DIMS + 1] for each in everyones]
            if len({each[0] for each in theirs} - {0}) > 1:
                text = "no mask" if mask is None else f"a mask of shape {tuple(mask.shape)}"
                self.refuse("must give masks of one number of dims", f"{text}: {kind}")
            widest = [max(each) for each in zip(*theirs, strict=True)]
            common.append(_widened(mask, widest, tensor))
        needs_gradient = any(each[3] for each in everyones)
        return _Known(sizes, all(each[2] for each in everyones), needs_gradient), common

    def refuse(self, rule: str, mine: str) -> None:
        """Raises an error with what each rank has received. Collective: TP_GROUP.

        Raises:
            SMPError: always.
        """
        assert self.words is not None
        self.words.refuse(rule, mine)


def _dims_of(mask: torch.Tensor | None) -> list[int]:
    """Returns the number of dims of a mask and their sizes; zeros for none."""
    sizes = [] if mask is None else list(mask.shape[1:])
    dims = 0 if mask is None else mask.dim()
    return [dims, *sizes, *[0] * (_MOST_DIMS - len(sizes))]


def _widened(mask: torch.Tensor | None, dims: list[int], like: torch.Tensor) -> torch.Tensor | None:
    """Returns a mask of the sizes that the ranks have in common."""
    number, *sizes = dims
    if not number:
        return None
    if mask is None:
        return like.new_zeros((like.shape[0], *sizes[: number - 1]))
    return mask.expand(like.shape[0], *sizes[: number - 1])
