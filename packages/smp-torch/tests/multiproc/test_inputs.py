"""When the first rank of a pipeline hands inputs out, and answers questions about them."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import argument_kinds
import pytest
import torch
from copy_cases import folder
from torch import nn
from world import generator, pipeline, run

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.common.testing import Worlds
from smdistributed.modelparallel.torch.execute.executor import Executor
from smdistributed.modelparallel.torch.record.costs import flops
from smdistributed.modelparallel.torch.stepping import eager, inputs
from smdistributed.modelparallel.torch.stepping.inputs import StepInputs
from smdistributed.modelparallel.torch.stepping.moving import DeviceCopies, Mover

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

WIDTH = 4
PIPELINE = pipeline(2, launcher="fork", microbatches=4)


def steps() -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Returns a step, one that writes to its targets, and a batch."""
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else "cpu"
    draws = generator(1)
    x, y = (torch.randn(8, WIDTH, generator=draws).to(device) for _ in range(2))

    @smp.step
    def reads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().sum()
        model.backward(loss)
        return loss

    @smp.step
    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y.mul_(2)).square().sum()
        model.backward(loss)
        return loss

    return reads, writes, x, y


def begins_before_inputs_are_taken() -> None:
    """The second rank takes its inputs when the first one computes, and not before."""
    step, _, x, y = steps()
    before = step(x, y).reduce_mean().item()
    with folder() as where:
        begun = where / "begun"
        run_all, receive = Executor.run, StepInputs._receive

        def begin(*args: Any) -> Any:
            if smp.rank() == 0:
                begun.touch()
            return run_all(*args)

        def take(*args: Any) -> Any:
            _await(begun)
            return receive(*args)

        with (
            mock.patch.object(Executor, "run", begin),
            mock.patch.object(StepInputs, "_receive", take),
        ):
            assert step(x, y).reduce_mean().item() == before


class Decides(nn.Module):
    """Has a layer that is whole on its rank decide by the input of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.routed = Routed()

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.routed(self.first(x), x > 0))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positive, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, is_positive: torch.Tensor) -> Any:
        return self.positive(x) if is_positive.all() else self.other(x)


def all_ranks_count_alike() -> None:
    """Elementwise operations count as on GPUs, where the answers to questions take some."""
    torch.manual_seed(0)
    net = Decides()
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    def everywhere(out: Any) -> bool:  # a mock would keep what it is given
        return True

    with mock.patch.object(flops, "_is_on_gpu", everywhere):
        for shift in (0.0, -0.5):
            x = torch.rand(8, WIDTH, generator=generator(1)) + shift
            found = [each.item() for each in step(x).outputs]
            assert found == pytest.approx([plain(one).square().sum().item() for one in x.split(2)])


def _await(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, "the first rank waits until its inputs are taken"
        time.sleep(0.01)


def are_sent_before(writing: bool) -> None:
    """Looks at what is under way when the first rank begins to compute, and at the numbers."""
    reads, writes, x, y = steps()
    step, given, under_way = (writes if writing else reads), y.clone(), []
    run_all = Executor.run

    def begin(*args: Any) -> Any:
        under_way.append(len(step._engine._inputs._sending))
        return run_all(*args)

    with mock.patch.object(Executor, "run", begin):
        step(x, y)
    assert (under_way[0] > 0) == (smp.rank() == 0 and not writing)
    assert not step._engine._inputs._sending
    assert torch.equal(y, 2 * given if writing else given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there its stream waits, not the process")
class MovesOnTheHost(Mover):
    """Stands in where no GPU is: tensors count as on the host, and copies lie there too."""

    def __init__(self, device: torch.device, rules: SplitRules) -> None:
        super().__init__(torch.device("meta"), rules, HostCopies(device))


class HostCopies(DeviceCopies):
    waited = 0

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each.clone() for each in tensors]

    def wait(self) -> None:
        HostCopies.waited += 1


def moves_inputs() -> float:
    """Both engines compute with copies, give gradients and writes back, and wait for copies."""
    with (
        mock.patch.object(eager, "Mover", MovesOnTheHost),
        mock.patch.object(inputs, "Mover", MovesOnTheHost),
    ):
        reads, writes, x, y = steps()
        loss = reads(x, y).reduce_mean().item()
        before = y.clone()
        x.requires_grad_()
        HostCopies.waited = 0
        assert writes(x, y).reduce_mean().item() != loss
    assert torch.equal(y, 2 * before)
    assert HostCopies.waited == 1
    if smp.pp_rank() == 0:
        assert x.grad is not None
        assert x.grad.abs().sum() > 0
    return loss


@pytest.mark.parametrize("degree", [1, 2])
def test_inputs_on_the_host_are_moved_once(worlds: Worlds, degree: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("stands in for GPUs; test_gpu has the same on them")
    world = pipeline(degree, launcher="fork", microbatches=4)
    run(worlds, world, moves_inputs)


def test_the_first_rank_begins_before_its_inputs_are_taken(worlds: Worlds) -> None:
    run(worlds, PIPELINE, begins_before_inputs_are_taken)


@pytest.mark.parametrize("writing", [False, True])
def test_inputs_that_a_step_writes_to_are_sent_before(worlds: Worlds, writing: bool) -> None:
    run(worlds, PIPELINE, are_sent_before, writing)


def test_what_an_answer_takes_is_no_cost_of_the_model(worlds: Worlds) -> None:
    run(worlds, PIPELINE, all_ranks_count_alike)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(
    ("first", "stride"),
    [(0, 37), *(pytest.param(part, 8, marks=pytest.mark.slow) for part in range(8))],
)
def test_arguments_are_cut_in_whatever_they_are(
    worlds: Worlds, degree: int, first: int, stride: int
) -> None:
    world = pipeline(degree, argument_kinds.MICROBATCHES, launcher="fork")
    counts = run(worlds, world, argument_kinds.run, first, stride, timeout=110)[0]
    assert min(counts["exact"], counts["refused"]) > 0
