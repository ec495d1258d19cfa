"""Times of the operations of a microbatch, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn

from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.torch.planning import tape_timing
from smdistributed.modelparallel.torch.planning.tape_timing import TimedTape, timed_tape
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.costs.work import Operations
from smdistributed.modelparallel.torch.record.recorder import Recorder

WIDTH = 8


class Timed(Recorded):
    """Records a step, and times its operations."""

    def _recorder(self) -> Recorder:
        operations = Operations()
        self.meter = Meter(self.mode, operations, not_kept=self.scene.storages)
        # The first one sees the microbatch, and the others what follows from it.
        self.first = getattr(self, "first", (self.meter, operations))
        return Recorder(self.scene, self.mode, CPU, self.random, self.meter, self.numbers.__next__)

    def tape(self, net: nn.Module) -> TimedTape | None:
        """Returns the times of the operations of a microbatch."""

        def step(x: torch.Tensor) -> None:
            self.backward(net(x).sum())

        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.meter.keep(tensor), lambda kept: self.meter.give(kept)
        )
        with hooks:
            self.passes(step, torch.ones(4, WIDTH))
        meter, operations = self.first
        assert meter.tape is not None
        return timed_tape(meter.tape, operations, CPU)


def timed(net: nn.Module) -> TimedTape | None:
    return Timed(net, {}).tape(net)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which every call takes a second."""
    monkeypatch.setattr(tape_timing.time, "thread_time", itertools.count().__next__)


@pytest.mark.usefixtures("_clock")
def test_each_operation_of_both_passes_counts_where_it_belongs() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    tape = timed(net)
    assert tape is not None
    end = len(tape.forward)
    whole = tape.costs([(0, end)])
    # Two products, tanh and the sum. Backward: what the sum expands; of the last layer products
    # for weight and input, the sum for the bias, two sums of gradients; tanh; the first weight.
    assert whole.forward == 4
    assert whole.weights == 2 * 2
    first = next(at for at, seconds in enumerate(tape.forward) if seconds) + 1
    front, back = tape.costs([(0, first)]), tape.costs([(first, end)])
    assert front == PassCosts(1, 2, 2)  # its input needs no gradient
    assert front + back == whole
    assert back.backward > front.backward


def test_real_times_are_those_of_a_core_and_leave_no_trace() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    tape = timed(net)
    assert tape is not None
    costs = tape.costs([(0, len(tape.forward))])
    assert costs.forward > 0
    assert costs.backward > costs.weights > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_backward_pass_with_code_of_the_users_is_not_timed() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Doubled.apply(self.inner(x))  # type: ignore[no-untyped-call]
            return found

    assert timed(Net()) is None


def test_recurrent_kernels_are_not_called_without_what_their_forward_pass_noted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x[None])[0]
            return found

    assert timed(Net()) is None
