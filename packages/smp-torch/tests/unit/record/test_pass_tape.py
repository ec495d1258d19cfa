"""What passes hold, counted on fakes, beside what they hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.planning.pass_memory import PassMemory
from smdistributed.modelparallel.common.planning.pass_tape import PassTape
from smdistributed.modelparallel.torch.activations import checkpointing
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.recorder import Recorder

ROWS, WIDTH = 64, 32
#: Of an activation.
SIZE = 4 * ROWS * WIDTH

native_checkpoint = functools.partial(checkpoint, use_reentrant=False)


class Noted(Recorded):
    """Records a step, and notes what its passes hold."""

    def _recorder(self) -> Recorder:
        self.meter = Meter(self.mode, not_kept=self.scene.storages)
        return Recorder(self.scene, self.mode, CPU, self.random, self.meter, self.numbers.__next__)

    def tape(self, function: Callable[..., Any], *args: Any) -> PassTape:
        """Returns the tape of a microbatch."""

        def keep(tensor: torch.Tensor) -> Any:
            return self.meter.keep(tensor)

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: self.meter.give(kept)):
            tape = self.passes(function, *args).profile.tape
        assert tape is not None
        return tape


def _tape(net: nn.Module) -> PassTape:
    noted = Noted(net, {})

    def step(x: torch.Tensor) -> None:
        noted.backward(net(x).sum())

    return noted.tape(step, torch.ones(ROWS, WIDTH))


def _whole(net: nn.Module) -> PassMemory:
    tape = _tape(net)
    return tape.memory([(0, tape.num_operations)])


def test_what_views_share_is_kept_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x.view(-1, WIDTH)) * torch.exp(x).t().t()

    # The first result, for the second layer; that of exp, for itself and the product; the second.
    assert _whole(Net()).kept == 3 * SIZE


def test_what_a_pass_makes_on_its_way_is_there_until_its_last_use() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return ((x + 1) + 2) + 3  # nothing is kept, and two are there at a time

    found = _whole(Net())
    assert found.kept == 0
    assert 2 * SIZE <= found.forward < 2.1 * SIZE


def test_a_backward_pass_begins_with_what_is_kept_and_frees_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    tape = _tape(Net())
    found = tape.memory([(0, tape.num_operations)])
    weight = 4 * WIDTH * WIDTH
    assert found.kept == 4 * SIZE  # each is kept by relu, and by the next layer
    assert found.weights == weight
    # At most a gradient, and the one that is made of it, beside all that is kept.
    assert found.kept + SIZE <= found.backward <= found.kept + 2 * SIZE + 2 * weight
    # For the gradients of weights: three inputs are kept activations, and four gradients.
    assert found.waiting == 7 * SIZE
    assert found.waiting <= found.first_half <= found.waiting + 3 * SIZE
    # A half of the layers keeps half of it, and begins its backward pass with no more.
    middle = tape.num_operations // 2
    halves = tape.memory([(0, middle)]), tape.memory([(middle, tape.num_operations)])
    assert halves[0].kept + halves[1].kept in (found.kept, found.kept + SIZE)
    assert max(each.backward for each in halves) < found.backward


def test_gradients_of_weights_are_added_up_as_they_come() -> None:
    wide = 8 * WIDTH
    net = nn.Sequential(*(nn.Linear(wide, wide) for _ in range(6)))
    noted = Noted(net, {})

    def step(x: torch.Tensor) -> None:
        noted.backward(net(x).sum())

    tape = noted.tape(step, torch.ones(1, wide))
    found = tape.memory([(0, tape.num_operations)])
    assert 4 * wide**2 <= found.backward < 1.5 * 4 * wide**2


def test_the_loss_is_what_takes_most() -> None:
    net = nn.Linear(WIDTH, 50 * WIDTH)
    noted = Noted(net, {})

    def step(x: torch.Tensor, targets: torch.Tensor) -> None:
        noted.backward(nn.functional.cross_entropy(net(x), targets))

    tape = noted.tape(step, torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    found = tape.memory([(0, tape.num_operations)])
    # Logarithms are kept; their gradient is there beside that of the logits.
    assert found.kept == pytest.approx(50 * SIZE, rel=0.01)
    assert found.backward == pytest.approx(150 * SIZE, rel=0.01)


@pytest.mark.parametrize("how", [checkpointing.checkpoint, native_checkpoint])
def test_what_a_checkpointed_call_adds_to_a_cache_stays(how: Callable[..., Any]) -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[torch.Tensor] = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
            cache.keys.append(super().forward(x).tanh())
            return torch.exp(x) * cache.keys[-1]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache = Cache()
            for layer in self.layers:
                x = how(layer, x, cache)
            return x

    assert _whole(Net()).held == 2 * SIZE


def test_code_of_the_users_in_the_backward_pass_does_not_run() -> None:
    ran = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            ran.append(gradient)
            return 2 * gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Twice.apply(torch.relu(self.layer(x)))  # type: ignore[no-untyped-call]
            return found

    found = _whole(Net())
    assert not ran
    assert found.kept == SIZE
    assert found.backward == 2 * found.forward  # the gradients are taken to be as large
