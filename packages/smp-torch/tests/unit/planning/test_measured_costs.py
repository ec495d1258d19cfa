"""Partitions and schedules by what was measured: seconds of operations, bytes that are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.torch.planning import timing
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.timing import measure
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.costs.work import Operations, Work

CPU = torch.device("cpu")
WIDTH = 8


def names_of(step: Callable[[], Any], operations: Operations | None = None) -> tuple[str, ...]:
    with Meter(operations=operations or Operations()) as meter:
        before = meter.reading()
        step()
        return meter.work_since(before).operations


def test_equal_calls_are_one_operation_and_views_are_none() -> None:
    operations, x = Operations(), torch.ones(2, 3)
    names = names_of(lambda: [(x.t() + 1).sum() for _ in range(2)], operations)
    assert len(names) == 4
    assert len(operations.known) == 2
    different = [x + 1, x.t() + 1, x.double() + 1, x + 2]
    assert len({names_of(lambda t=t: t + 1) for t in different[:3]}) == 3
    assert names_of(lambda: x + 1) != names_of(lambda: x + 2)
    needing = torch.ones(2, 3, requires_grad=True)
    assert names_of(lambda: x * 2) != names_of(lambda: needing * 2)
    with torch.no_grad():
        assert names_of(lambda: x * 2) == names_of(lambda: needing * 2)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a call takes a second, and a backward pass ten."""

    def seconds(function: Callable[[], Any], device: torch.device) -> float:
        function()
        return 10.0 if function.__name__ == "differentiate" else 1.0

    monkeypatch.setattr(timing, "seconds_of", seconds)


def costs_of(step: Callable[[], Any]) -> list[PassCosts]:
    operations = Operations()
    names = names_of(step, operations)
    found = measure(operations.known, CPU)
    assert found.keys() == operations.known.keys()
    return [found[name] for name in names]


@pytest.mark.usefixtures("_clock")
def test_both_passes_of_each_operation_are_timed() -> None:
    x, weight = torch.ones(4, 3), nn.Parameter(torch.ones(3, 3))
    assert costs_of(lambda: x + 1) == [PassCosts(1)]
    assert costs_of(lambda: x @ weight) == [PassCosts(1, 10, 5)]
    assert costs_of(lambda: torch.tanh(weight)) == [PassCosts(1, 10)]
    # In place: the gradient passes through an operation like it.
    assert costs_of(lambda: (weight * 1).relu_()) == [PassCosts(1, 10), PassCosts(1, 1)]
    indices = torch.tensor([2, 1])
    assert costs_of(lambda: F.embedding(indices, weight)) == [PassCosts(1, 10)]
    probabilities = torch.rand(3)
    assert costs_of(lambda: torch.multinomial(probabilities, 1)) == [PassCosts(1)]


@pytest.mark.usefixtures("_clock")
def test_what_cannot_be_called_by_itself_computes_as_fast_as_the_rest() -> None:
    positive = torch.eye(64)
    product = positive[:32, :32].contiguous()

    def step() -> Any:
        return product @ product, torch.linalg.cholesky(positive * 2)

    operations = Operations()
    names = names_of(step, operations)
    failing = next(each for each in names if "cholesky" in each)
    known = operations.known[failing]
    operations.known[failing] = type(known)(known.function, (), {}, 2**17, 0)
    # A product of 2 ** 16 operations takes a second; so do three other calls without any.
    assert measure(operations.known, CPU)[failing] == PassCosts(2.0 * 2, 4.0 * 2)


def test_a_clock_is_used_and_no_generator_moves() -> None:
    operations, state = Operations(), torch.get_rng_state()
    names_of(lambda: torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64), operations)
    assert all(costs.forward > 0 for costs in measure(operations.known, CPU).values())
    assert torch.equal(torch.get_rng_state(), state)


def test_costs_are_counted_or_measured() -> None:
    costs, work = ComputeCosts(), Work(10, 4, operations=("a", "b", "a"))
    assert costs.of(work) == PassCosts(10, 2 * 4 + 2.5 * 6, 4)
    costs.measures = True
    costs.take({"a": PassCosts(1, 3, 1), "b": PassCosts(5, 5)})
    assert costs.of(work) == PassCosts(7, 11, 2)


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(super().forward(x), -1)


@pytest.mark.parametrize("measures", [False, True])
def test_partition_and_plan_go_by_measured_seconds(measures: bool) -> None:
    slow = 100.0
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], Slow(WIDTH, WIDTH))
    recorded = Recorded(model, {})
    recorded.memory_weight = 0.0
    recorded.operations, recorded.costs.measures = Operations(), measures

    def train(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        recorded.backward(loss)
        assert recorded.operations is not None
        seconds = {name: slow if "cumsum" in name else 1.0 for name in recorded.operations.known}
        recorded.costs.take({name: PassCosts(each, 1.0) for name, each in seconds.items()})
        return loss

    x = torch.ones(2, WIDTH)
    units = recorded.place(train, x).assignment.units
    assert [units[str(index)] for index in range(4)] == [0, 0, int(not measures), 1]
    plan = recorded.plan(train, x)
    first, last = plan.segment_graph(2).segments
    assert plan.in_seconds is measures
    assert (last.forward_cost > slow > first.forward_cost) is measures
    # Ranks that do not have the same costs are told so, before they run two schedules.
    assert str(plan.segments[1].costs) in plan.lines()[-1]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.sigmoid(self.inner(x))).sum(-1, keepdim=True)

        result: torch.Tensor = checkpoint(inside, x, use_reentrant=False)
        return result


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh(), nn.LayerNorm(WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Softmax(-1)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed()),
    ],
    ids=["layers", "dropout", "checkpointed"],
)
def test_what_is_kept_is_what_autograd_keeps(model: nn.Sequential) -> None:
    x = torch.ones(16, WIDTH)
    real: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        real[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(x)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    wanted = sum(each.nbytes() for key, each in real.items() if key not in own)
    del result
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters = {name: mode.from_tensor(each) for name, each in model.named_parameters()}
    storages = {each.untyped_storage()._cdata for each in parameters.values()}
    with mode, Meter(mode, not_kept=storages, counts_kept=True) as meter:
        kept = saved_tensors_hooks(meter.keep, meter.give)
        with kept:
            torch.func.functional_call(model, parameters, (mode.from_tensor(x),))
    assert meter.bytes == wanted > 0
