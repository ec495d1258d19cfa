"""A call of a step function as values that the step passes on; none of them changes.

``Call`` is what one process was called with, ``CallKind`` what a recording depends on of it,
``Header`` what rank 0 of the pipeline says of it, ``Round`` what its microbatches did there, and
``MiniBatch`` what every rank then has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.torch.record.failure import Failure
from smdistributed.modelparallel.torch.stepping.moving import NOTHING, Moved
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

#: Arguments by position and by keyword: of a step function, or of one microbatch.
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class State:
    """What a recording depends on besides the arguments.

    Attributes:
        modes: grad mode, inference mode, autocast.
        models: for each model of the process its number, version, training flags and
            requires_grad flags.
    """

    modes: tuple[object, ...]
    models: tuple[tuple[int, int, tuple[bool, ...], tuple[bool, ...]], ...]

    def agrees_with(self, other: State) -> bool:
        """Whether two ranks are in one state; models that only one still has do not count."""
        theirs = {each[0]: each for each in other.models}
        return self.modes == other.modes and all(
            theirs.get(each[0], each) == each for each in self.models
        )


@dataclass(frozen=True)
class CallKind:
    """What a recording depends on of a call, besides what its Python sees.

    Attributes:
        tensors: the specs of its tensor arguments, in order.
        overlapping: pairs of them, by position, that may share memory.
        state: training flags, grad mode and the like.
    """

    tensors: tuple[TensorSpec, ...]
    overlapping: tuple[tuple[int, int], ...]
    state: State


@dataclass(frozen=True)
class Round:
    """What rank 0 of the pipeline tells of some microbatches whose Python it has run.

    Attributes:
        answers: for each microbatch, what it answered about its inputs.
        ways: for each microbatch that came to its end, the number of its way; None if the
            partition is not decided.
        is_new: some way was not known before.
        is_open: the last microbatch shows what the partition may be, which is decided next.
        begins: the last microbatch has begun, in which much is new: the others make it beside rank
            0, which tells of each question.
        asks: the last microbatch is under way, and asks about an activation.
        failure: what was raised by the last microbatch.
    """

    answers: tuple[Sequence[Any], ...]
    ways: tuple[int | None, ...]
    is_new: bool
    is_open: bool
    begins: bool
    asks: bool
    failure: Failure | None


@dataclass(frozen=True)
class Asked:
    """A question of a microbatch that the others make beside rank 0, as that tells of it.

    Attributes:
        of_all: it is about an activation again; else rank 0 has answered it.
        answer: its answer.
    """

    of_all: bool
    answer: Any = None


@dataclass(frozen=True)
class Recalled:
    """An earlier call of a static step, which a new one is like.

    Attributes:
        number: of that call.
        is_checked: the Python runs, and must do the same.
    """

    number: int
    is_checked: bool


@dataclass(frozen=True)
class Header:
    """What rank 0 of the pipeline tells the others at the start of a call.

    Attributes:
        kind: what it was called with.
        seed: of the random numbers of this step.
        recalled: what is known of a static step; None if the Python has to run.
    """

    kind: CallKind
    seed: int
    recalled: Recalled | None = None


@dataclass(frozen=True)
class MiniBatch:
    """A call that the ranks of the pipeline have agreed on.

    Attributes:
        header: what rank 0 of the pipeline said of it.
        given: what this rank was called with.
        calls: the arguments of each microbatch: on rank 0 of the pipeline with the real tensors,
            elsewhere with fakes of them.
        weights: the share of each microbatch in the batch; they add up to 1.
        moved: what of it the script gave on the host, on rank 0 of the pipeline.
    """

    header: Header
    given: Call
    calls: Sequence[Call]
    weights: Sequence[float]
    moved: Moved = NOTHING
