"""Ranks whose backward passes differ give what one process gives, or are refused.

A population of ways in which they differ, models, moments and calls: each case trains for two steps
beside plain PyTorch, which differentiates the losses of all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ended_jobs import check_job
from tensor_cases import alone, local_part, slice_itself
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

WIDTH = 8
STEPS, MICROBATCHES = 2, 2


class Net(nn.Module):
    """A body and two heads; what a rank does with them is set for each case."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, 4)
        self.way: Callable[..., tuple[torch.Tensor, torch.Tensor]] = plainly
        self.is_odd = False

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.way(self, states)


def hidden(net: Net, states: torch.Tensor) -> torch.Tensor:
    return net.norm(net.body(states))


def plainly(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    return net.one(found), net.other(found)


def body_detached(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    found = found.detach() if net.is_odd else found
    return net.one(found), net.other(found)


def head_detached(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    return net.one(found.detach() if net.is_odd else found), net.other(found)


def other_branch(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    one = net.one(found)
    return one, net.other(one if net.is_odd else found)


def states_with_gradient(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return plainly(net, states.detach().requires_grad_() if net.is_odd else states)


def without_gradients(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    with torch.set_grad_enabled(not net.is_odd):
        other = net.other(found)
    return net.one(found), other


def called_in_another_order(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    if net.is_odd:
        other = net.other(found)
        return net.one(found), other
    return net.one(found), net.other(found)


def called_once_more(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    one = net.one(found)
    return net.one(one) if net.is_odd else one, net.other(found)


def head_not_called(net: Net, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    return net.one(found), found if net.is_odd else net.other(found)


def checkpointed(
    net: Net, states: torch.Tensor, *, use_reentrant: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    found = hidden(net, states)
    found = checkpoint(lambda each: net.one(each), found, use_reentrant=use_reentrant)
    return found, checkpoint(lambda each: net.other(each), found, use_reentrant=use_reentrant)


FORWARDS = {
    "alike": plainly,
    "body detached": body_detached,
    "head detached": head_detached,
    "other branch": other_branch,
    "states with gradient": states_with_gradient,
    "without gradients": without_gradients,
    "another order of calls": called_in_another_order,
    "a call more": called_once_more,
    "a call less": head_not_called,
    "checkpointed": functools.partial(checkpointed, use_reentrant=False),
    "checkpointed reentrantly": functools.partial(checkpointed, use_reentrant=True),
}


def both(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return found[0].square().mean() + found[1].sin().mean()


def passes_of(kind: str, found: Any, is_odd: bool) -> Iterator[torch.Tensor]:
    """Yields the losses that a rank differentiates, one after the other."""
    one, other = found[0].square().mean(), found[1].sin().mean()
    if kind == "other head" and is_odd:
        yield other
    elif kind in ("other head", "one head") or (kind == "head left out" and is_odd):
        yield one
    elif kind == "none" and is_odd:
        return
    elif kind == "of no exchange" and is_odd:
        yield found[0].detach().requires_grad_().sum()
    elif kind == "times zero" and is_odd:
        yield one + 0 * other
    else:
        yield both(found)


PASSES = (
    "alike", "other head", "head left out", "none", "of no exchange", "times zero", "by the script",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What one rank does otherwise.

    Attributes:
        model: how it is made.
        forward: see ``FORWARDS``.
        passes: see ``PASSES``.
        moment: in which microbatches or steps.
        is_outside: outside of step functions.
    """

    model: str
    forward: str
    passes: str
    moment: str
    is_outside: bool


#: A case in which they do not differ.
ALIKE: dict[str, Any] = {"forward": "alike", "passes": "alike", "is_outside": False}
#: (step, microbatch) -> whether ranks differ
MOMENTS: dict[str, Callable[[int, int], bool]] = {
    "always": lambda step, microbatch: True,
    "in the first microbatch": lambda step, microbatch: microbatch == 0,
    "in the last microbatch": lambda step, microbatch: microbatch == MICROBATCHES - 1,
    "in the second step": lambda step, microbatch: step == 1,
}


def cases(model: str) -> list[Case]:
    """Returns the population of one kind of models."""
    found = [
        Case(model, forward, passes, moment, is_outside)
        for forward, passes, moment, is_outside in itertools.product(
            FORWARDS, PASSES, MOMENTS, (False, True)
        )
        if (forward, passes) != ("alike", "alike")
    ]
    return [each for each in found if not (each.is_outside and "microbatch" in each.moment)]


class NoReferenceError(Exception):
    """Plain PyTorch itself cannot do what a case does."""


class Training:
    """A split model and plain PyTorch beside it.

    Args:
        case: how ranks differ.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(5)
        self.model = self.split()
        torch.manual_seed(5)
        with alone():
            self.plain = self.made()
        self.place = (0, 0)
        self._found: list[tuple[str, Any, Any]] = []
        training = self

        @smp.step
        def train(model: Any, states: torch.Tensor) -> torch.Tensor:
            training.one_microbatch(states)
            training.place = (training.place[0], training.place[1] + 1)
            return states.sum()

        self._train = train

    def made(self) -> Net:
        return Net()

    def split(self) -> smp.DistributedModel:
        options = {"auto": True} if self.case.model == "auto" else {}
        with smp.tensor_parallelism(enabled=self.case.model != "replicas", **options):
            net = self.made()
        # Ranks need not differentiate as often as each other.
        return smp.DistributedModel(net, overlapping_allreduce=False)

    def states(self, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        return torch.randn(8, WIDTH)

    def one_microbatch(self, states: torch.Tensor) -> None:
        net = self.model.get_module()
        is_odd = MOMENTS[self.case.moment](*self.place) and smp.dp_rank() == 1
        net.way, net.is_odd = FORWARDS[self.case.forward], is_odd
        found = self.model(states)
        by_script = self.case.passes == "by the script" and is_odd
        for loss in passes_of(self.case.passes, found, is_odd):
            if by_script:
                loss.backward()
            else:
                self.model.backward(loss)

    def expected(self, step: int, states: torch.Tensor) -> None:
        self.plain.zero_grad()
        number = 1 if self.case.is_outside else MICROBATCHES
        for rank, part in enumerate(states.chunk(smp.dp_size())):
            for microbatch, each in enumerate(part.chunk(number)):
                is_odd = MOMENTS[self.case.moment](step, microbatch) and rank == 1
                self.plain.way = FORWARDS[self.case.forward]
                self.plain.is_odd = is_odd
                for loss in passes_of(self.case.passes, self.plain(each), is_odd):
                    (loss / smp.dp_size() / number).backward()

    def step(self, step: int) -> None:
        states = self.states(step)
        with alone():
            try:
                self.expected(step, states)
            except RuntimeError as error:
                raise NoReferenceError from error
        self.model.zero_grad()
        self.place = (step, 0)
        own = states.chunk(smp.dp_size())[smp.dp_rank()]
        if self.case.is_outside:
            self.one_microbatch(own)
        else:
            self._train(self.model, own)
        wanted = dict(self.plain.named_parameters())
        for name, each in self.model.local_named_parameters():
            want = wanted[name].grad
            got = None if each.grad is None else slice_itself(each.grad).clone()
            part = None if want is None else local_part(self.model, name, want).clone()
            self._found.append((f"{name} in step {step}", got, part))

    def compare(self) -> None:
        """Compares gradients, once ranks have met in a step in which they do the same.

        Where one of them has done more than the others outside of steps, it is found there.
        """
        self.case = dataclasses.replace(self.case, **ALIKE)
        self.step(STEPS)
        for name, got, want in self._found:
            if want is None or got is None:
                assert got is None or not got.any(), name
                assert want is None, name
            else:
                torch.testing.assert_close(got, want, msg=name)


def outcome(kind: Callable[[Case], Training], case: Case) -> str:
    """Returns what became of a case on this rank."""
    try:
        training = kind(case)
        for step in range(STEPS):
            training.step(step)
        training.compare()
    except SMPError as error:
        text = str(error)
        if "did not answer" in text or "timed out" in text:
            return "hanging"
        clear = "the ranks of a tensor-parallel group must", "model.backward"
        is_clear = any(words in text for words in clear)
        return "refused" if is_clear else f"unclear: {text[:300]}"
    except NoReferenceError:
        return "not in PyTorch"
    except AssertionError as error:
        return f"wrong: {error}"[:200]
    except Exception as error:
        return f"unclear: {type(error).__name__}: {error}"[:300]
    return "exact"


def population_of(
    kind: Callable[[Case], Training], cases: Sequence[Case], first: int, stride: int
) -> dict[str, int]:
    """Tries cases of a kind of training; returns how often all ranks came to which end."""
    found: Counter[str] = Counter()
    for number, case in list(enumerate(cases))[first::stride]:
        mine = outcome(kind, case)
        check_job(number, found + Counter([mine.partition(":")[0]]))
        ends = set(smp.allgather(mine, smp.WORLD))
        end = ends.pop() if len(ends) == 1 else f"unlike: {sorted(ends | set())}"
        if end not in ("exact", "refused", "not in PyTorch"):
            print(f"{case}: {end}", flush=True)
        found[end.partition(":")[0]] += 1
    return dict(found)


def population(model: str, first: int, stride: int) -> dict[str, int]:
    """Tries cases; returns how often all ranks came to which end."""
    return population_of(Training, cases(model), first, stride)
