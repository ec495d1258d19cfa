"""Whether a distributed trial gave the numbers of one process."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from trial import Failure, Parts, Record, Step

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
#: What rounding alone can make of a gradient, as a share of the model's largest: one that is zero
#: in exact arithmetic (of a bias of all keys, say, which a softmax does not see) is a sum of terms
#: of about that size.
ROUNDING = torch.finfo(torch.float32).eps


#: An error that names what tensor-parallel ranks do differently, because their data say so.
_OF_RANKS = "the ranks of a tensor-parallel group must"


class Kind(enum.Enum):
    """The three outcomes that count, and those that say that there was nothing to count."""

    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"
    ABSENT = "absent"
    INAPPLICABLE = "inapplicable"
    UNUSABLE = "unusable"


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one trial.

    Attributes:
        kind: the outcome; "unusable": one process could not do it either.
        reason: in one line; if exact, what there is to say of it.
        details: stacks and the like.
        visits: the rank of each segment of the forward pass.
        difference: the largest relative one among losses and gradients.
    """

    kind: Kind
    reason: str = ""
    details: str = ""
    visits: tuple[int, ...] = ()
    difference: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether both sides ran to their ends and gave different numbers."""
        return self.kind is Kind.WRONG and bool(self.visits)


def judge(reference: Record, ranks: Sequence[Record]) -> Verdict:
    """Holds the records of all ranks against that of one process."""
    if reference.failure:
        kinds = {each.value: each for each in (Kind.ABSENT, Kind.INAPPLICABLE)}
        kind = kinds.get(reference.failure.kind, Kind.UNUSABLE)
        return Verdict(kind, reference.failure.reason, reference.failure.details)
    failure = _first_failure(ranks)
    if failure:
        told = _OF_RANKS in "".join(each.failure.reason for each in ranks if each.failure)
        kind = Kind.REFUSED if failure.kind == "refused" or told else Kind.WRONG
        reason = failure.reason if kind is Kind.REFUSED else f"{failure.kind}: {failure.reason}"
        return Verdict(kind, _line(reason), failure.details)
    if ranks[0].parts is not None:
        return _judge_slices(reference, ranks, ranks[0].parts)
    visits = tuple(ranks[0].visits)
    empty = [rank for rank, record in enumerate(ranks) if not record.num_elements]
    if empty or set(visits) != set(range(len(ranks))):
        return Verdict(Kind.UNUSABLE, f"not split: ranks {empty} own nothing; visits {visits}")
    comparison = _Comparison()
    comparison.compare(reference, ranks)
    kind = Kind.WRONG if comparison.complaints else Kind.EXACT
    return Verdict(
        kind,
        "; ".join(comparison.complaints[:1]) or _line(ranks[0].in_turn),
        "\n".join(comparison.complaints),
        visits,
        comparison.largest,
    )


def _judge_slices(reference: Record, ranks: Sequence[Record], parts: Parts) -> Verdict:
    """Holds ranks that split modules, each with examples of its own, against one process."""
    comparison = _Comparison()
    named = parts.families == 0  # a family's map gives other names
    joined = [
        [_joined(ranks, number, rank, named=named) for number in range(len(ranks[0].steps))]
        for rank in range(len(ranks))
    ]
    steps = [replace(step, gradients=step.gradients if named else {}) for step in reference.steps]
    if any(
        not torch.equal(buffer, each.buffers[name])
        for name, buffer in reference.buffers.items()
        for each in ranks
        if name in each.buffers
    ):
        # Statistics of batches are of own examples, as with any data parallelism; the evaluation
        # goes by them.
        for each in (steps, *joined):
            del each[-1]
    for each in joined:
        comparison.compare(Record(steps=steps), [Record(steps=each)])
    kind = Kind.WRONG if comparison.complaints else Kind.EXACT
    made = ", ".join(f"{number} {what}" for what, number in vars(parts).items() if number)
    return Verdict(
        kind,
        "; ".join([*comparison.complaints[:1], made]),
        "\n".join(comparison.complaints),
        (0,),
        comparison.largest,
    )


def _joined(ranks: Sequence[Record], number: int, rank: int, *, named: bool) -> Step:
    """Returns what a step gave, with the examples of all ranks, and the gradients of one."""
    steps = [each.steps[number] for each in ranks]
    results = {
        name: [tensor for each in steps for tensor in each.results[name]]
        for name in steps[0].results
    }
    # Between steps slices, and their gradients, stand for the whole.
    return Step(results, steps[rank].gradients if named else {})


def _first_failure(ranks: Sequence[Record]) -> Failure | None:
    """Returns the failure that caused the others: not what a rank says that waited for it."""
    failures = [record.failure for record in ranks if record.failure]
    failures.sort(key=lambda failure: (failure.kind == "died", "CommError" in failure.reason))
    return failures[0] if failures else None


class _Comparison:
    """Collects what differs."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.largest = 0.0

    def compare(self, reference: Record, ranks: Sequence[Record]) -> None:
        for index, expected in enumerate(reference.steps):
            where = "evaluation" if index == len(reference.steps) - 1 else f"step {index}"
            for rank, record in enumerate(ranks):
                for name, tensors in expected.results.items():
                    for m, want in enumerate(tensors):
                        got = record.steps[index].results[name][m]
                        place = f"{where}: {name} of microbatch {m} on rank {rank}"
                        self._close(
                            got,
                            want,
                            LOSS_TOLERANCE if name == "loss" else GRADIENT_TOLERANCE,
                            place,
                        )
            gathered = [each for record in ranks for each in record.steps[index].gradients.items()]
            if len(gathered) != len(expected.gradients):
                self.complaints.append(
                    f"{where}: {len(gathered)} gradients on all ranks together, "
                    f"{len(expected.gradients)} on one process"
                )
            self._gradients(dict(gathered), expected.gradients, where)
        for name, want in reference.buffers.items():
            # Buffers of split modules are on every rank.
            copies = [record.buffers[name] for record in ranks if name in record.buffers]
            for got in copies:
                self._close(got, want, GRADIENT_TOLERANCE, f"buffer {name}")
            if not copies:
                self.complaints.append(f"buffer {name} is on no rank")

    def _gradients(
        self, got: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None], where: str
    ) -> None:
        rounding = ROUNDING * max((_largest(each) for each in want.values()), default=0.0)
        for name, expected in want.items():
            found = got.get(name)
            place = f"{where}: gradient of {name}"
            if found is None or expected is None:
                size = max(_largest(found), _largest(expected))
                if size > rounding:
                    side = "missing" if found is None else "not expected"
                    self.complaints.append(f"{place} is {side}; its largest is {size:.1e}")
            else:
                self._close(found, expected, GRADIENT_TOLERANCE, place, rounding)

    def _close(
        self,
        got: torch.Tensor,
        want: torch.Tensor,
        tolerance: float,
        place: str,
        rounding: float = 0.0,
    ) -> None:
        if got.shape != want.shape or got.dtype != want.dtype:
            self.complaints.append(
                f"{place} is {got.dtype} {tuple(got.shape)}; expected {want.dtype} "
                f"{tuple(want.shape)}"
            )
            return
        if torch.equal(got, want):
            return
        got, want = got.double(), want.double()
        same = (got == want) | (got.isnan() & want.isnan())
        difference = float(torch.where(same, 0.0, (got - want).abs()).max())
        scale = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 0.0
        if difference <= rounding:
            return
        relative = difference / scale if scale else float("inf")
        self.largest = max(self.largest, relative)
        if not relative <= tolerance:
            self.complaints.append(
                f"{place} differs by {relative:.1e} of its largest ({scale:.1e})"
            )


def _largest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


def _line(text: str) -> str:
    return " ".join(text.split())
