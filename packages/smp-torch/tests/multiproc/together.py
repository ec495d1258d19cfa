"""Calls that processes make together, where one of them runs code alone, are refused at once.

A population of such calls, of places in a pipelined step, and of moments. The code that makes a
call notes what it comes to and goes on, so that one job tries all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.api.slot import slot

WIDTH = 4
#: No checkpoint gets there.
PATH = "/nowhere"
#: In each message that says what is wrong.
CLEAR = ("is for several processes together", "a pipelined step runs", "step function")


class Tried:
    """What is called, and what has come of it: in a file, which no module can see change."""

    def __init__(self) -> None:
        self.is_on = False
        self.call: Callable[[], object] = lambda: None
        self._file = os.memfd_create("ends")

    def at(self, place: str) -> None:
        """Makes the call in a place, but for a leaf that runs on stand-ins."""
        if self.is_on and (place in BETWEEN or not smp.is_tracing()):
            with self.noting(place, SMPError):
                self.call()
                self._note(place, "done")

    @contextlib.contextmanager
    def noting(self, place: str, kind: type[Exception]) -> Iterator[None]:
        """Notes errors of a kind that are raised inside, and goes on."""
        try:
            yield
        except kind as error:
            is_clear = isinstance(error, SMPError) and any(each in str(error) for each in CLEAR)
            words = f"unclear: {type(error).__name__}: {error}"
            self._note(place, "refused" if is_clear else words)

    def _note(self, place: str, end: str) -> None:
        os.write(self._file, f"{place}\t{' '.join(end.split())[:300]}\n".encode())

    def taken(self) -> list[tuple[str, ...]]:
        """Returns places and ends that have been noted since it was asked for."""
        os.lseek(self._file, 0, os.SEEK_SET)
        found = os.read(self._file, 1 << 20).decode().splitlines()
        os.truncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        return [tuple(line.split("\t")) for line in found]


TRIED = Tried()


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        TRIED.at("a function's backward")
        return gradient


class Leaf(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TRIED.at("a module that stays whole")
        result: torch.Tensor = OwnBackward.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return result


class Net(nn.Module):
    """Four layers, so that each partition has one of a class of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaf(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third, self.last = nn.Linear(WIDTH, WIDTH), Leaf(WIDTH, WIDTH)
        self.last.register_forward_hook(lambda *_: TRIED.at("a hook of a module"))
        self.last.register_full_backward_hook(lambda *_: TRIED.at("a backward hook of a module"))
        self.last.weight.register_hook(lambda _: TRIED.at("a hook of a gradient"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        TRIED.at("a module that is split")
        result: torch.Tensor = self.last(self.third(x))
        return result


BETWEEN = ("the step function", "a module that is split", "a backward hook of a module")
PLACES = (
    *BETWEEN, "a module that stays whole", "a hook of a module", "a hook of a gradient",
    "a function's backward",
)  # fmt: skip
#: Where what was refused before is raised.
STEP = "the end of the step"
#: Whether the step of such a number makes the call.
MOMENTS: dict[str, Callable[[int], bool]] = {
    "in the first step": lambda number: number == 0,
    "in a later step": lambda number: number == 2,
    "in each step": lambda number: True,
}


@smp.step
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    TRIED.at("the step function")
    model.backward(loss)
    return loss.detach()


@smp.step
def other(model: Any) -> None:
    """Does nothing."""


def _model() -> Any:
    """Returns the model that was made last: no module of it can see what this finds."""
    return slot.get().live_models()[-1]


def _optimizer() -> Any:
    return slot.get().live_optimizers()[-1]


def _peer() -> int:
    return (smp.rank() + 1) % smp.size()


CALLS: dict[str, Callable[[], object]] = {
    "barrier": smp.barrier,
    "mp_barrier": smp.mp_barrier,
    "pp_barrier": smp.pp_barrier,
    "allgather": lambda: smp.allgather(1, smp.PP_GROUP),
    "broadcast": lambda: smp.broadcast(1, smp.WORLD),
    "send": lambda: smp.send(1, _peer(), smp.RankType.WORLD_RANK),
    "recv_from": lambda: smp.recv_from(_peer(), smp.RankType.WORLD_RANK),
    "save_checkpoint": lambda: smp.save_checkpoint(PATH, "t", model=_model()),
    "save_checkpoint, full": lambda: smp.save_checkpoint(PATH, "t", partial=False, model=_model()),
    "resume_from_checkpoint": lambda: smp.resume_from_checkpoint(PATH),
    "state_dict": lambda: _model().state_dict(),
    "load_state_dict": lambda: _model().load_state_dict({}),
    "clip_grad_norm_": lambda: smp.clip_grad_norm_(_model(), 1.0),
    "clip_grad_norm_ of torch": lambda: nn.utils.clip_grad_norm_(_model().parameters(), 1.0),
    "optimizer.step": lambda: _optimizer().step(),
    "DistributedModel": lambda: smp.DistributedModel(nn.Linear(WIDTH, WIDTH)),
    "cpu": lambda: _model().cpu(),
    "timeline": train.timeline,
    "another step function": lambda: other(_model()),
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "all_reduce, asynchronous": lambda: dist.all_reduce(torch.ones(1), async_op=True),
    "all_gather": lambda: dist.all_gather([torch.ones(1)] * smp.size(), torch.ones(1)),
    "all_gather_object": lambda: dist.all_gather_object([None] * smp.size(), 1),
    "broadcast of torch": lambda: dist.broadcast(torch.ones(1), 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([None], 0),
    "barrier of torch": dist.barrier,
    "send of torch": lambda: dist.send(torch.ones(1), _peer()),
}
#: What concerns ranks of one partition, or none, and is done.
LOCAL: dict[str, Callable[[], object]] = {
    "tp_barrier": smp.tp_barrier,
    "get_rank": lambda: dist.get_rank() + dist.get_world_size(),
    "rank": lambda: smp.pp_rank() + len(smp.get_mp_group()),
}


def ends_of(call: Callable[[], object], moment: str) -> dict[str, set[str]]:
    """Returns what a call has come to in each place, on all ranks."""
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    TRIED.call = call
    for number in range(3):
        TRIED.is_on = MOMENTS[moment](number)
        with TRIED.noting(STEP, Exception):  # some are refused where the step ends
            train(model, torch.ones(4, WIDTH))
        optimizer.step()
    TRIED.is_on = False
    found: dict[str, set[str]] = {}
    for place, end in itertools.chain(*smp.allgather(TRIED.taken(), smp.WORLD)):
        found.setdefault(place, set()).add(end)
    return found


def is_right(name: str, ends: Mapping[str, set[str]]) -> bool:
    """Whether a call was refused in each place that the step came to; or done, if it is local."""
    wanted = {"done"} if name in LOCAL else {"refused"}
    if ends.get(STEP) == {"refused"} and name not in LOCAL:
        return all(each <= {"refused", "done"} for each in ends.values())
    return ends == dict.fromkeys(PLACES, wanted)


def population(first: int, stride: int) -> dict[str, int]:
    """Tries cases; returns how often they came to which end."""
    found: Counter[str] = Counter()
    calls = {**CALLS, **LOCAL}
    for name, moment in itertools.islice(itertools.product(calls, MOMENTS), first, None, stride):
        ends = ends_of(calls[name], moment)
        if not is_right(name, ends):
            print(f"{name} {moment}: {ends}", flush=True)
        found["right" if is_right(name, ends) else "wrong"] += 1
    return dict(found)
