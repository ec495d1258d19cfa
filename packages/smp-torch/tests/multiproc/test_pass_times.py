"""``trace_execution_times``: passes are timed in a step, and ordered by that from the next on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from world import generator, pipeline, quick, replicas, run

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.planning.simulator import TimedAction
from smdistributed.modelparallel.common.testing import Worlds
from smdistributed.modelparallel.torch.execute.executor import Executor
from smdistributed.modelparallel.torch.stepping import tracing

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

WIDTH, STEPS = 4, 8
#: What passes are said to take: on rank 0 twice what they take on the other, or on both alike.
SECONDS = {
    "uneven": {Kind.FORWARD: 1.0, Kind.INPUT_GRADIENTS: 5.0, Kind.WEIGHT_GRADIENTS: 0.5},
    "even": {Kind.FORWARD: 1.0, Kind.INPUT_GRADIENTS: 1.0, Kind.WEIGHT_GRADIENTS: 1.0},
}
WORLDS = {
    "halves": pipeline(2, launcher="fork", microbatches=4, pipeline="zero_bubble"),
    # Of fewer, whole backward passes are ordered by what they take, too.
    "whole": pipeline(2, launcher="fork", microbatches=8, pipeline="interleaved"),
    "replicas": replicas(2, 2, microbatches=4, pipeline="zero_bubble"),
}


class Heard(logging.Handler):
    """Keeps what the library says of times."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        library = logging.getLogger("smdistributed")
        library.setLevel(logging.INFO)
        library.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps it."""
        if "predicted" in record.getMessage():
            self.lines.append(record.getMessage())


def train(
    kind: str | None, sizes: Sequence[int], evaluates: Collection[int] = ()
) -> tuple[list[float], list[Any], list[str]]:
    """Trains, with times of passes that are made up.

    Args:
        kind: of the times; None: none are asked for.
        sizes: of the batch of each step.
        evaluates: the numbers of steps that do not train.

    Returns:
        the losses, the order of each step on this rank, and what was said.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = smp.DistributedModel(
        net, trace_execution_times=kind is not None, trace_device="gpu" if kind else "cpu"
    )
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    heard, orders = Heard(), []

    @smp.step
    def step(x: torch.Tensor, trains: bool) -> torch.Tensor:
        loss = model(x).square().sum()
        if trains:
            model.backward(loss)
        return loss

    def timed(executor: Executor, marks: Any) -> list[TimedAction]:
        # Rank 0 has twice the work where it is uneven.
        factor = 2.0 if kind == "uneven" and smp.pp_rank() == 0 else 1.0
        seconds = SECONDS[kind or "even"]
        return [
            TimedAction(each, 0.0, factor * seconds.get(each.kind, 2.0))
            for each in executor.actions
        ]

    def measured(operations: dict[str, Any], device: torch.device) -> dict[str, PassCosts]:
        return {
            name: PassCosts(each.flops, 5 * each.flops, 4 * each.flops)
            for name, each in operations.items()
        }

    numbers, losses = generator(1), []
    with (
        mock.patch.object(Executor, "timed", timed),
        mock.patch.object(tracing, "measure", measured),
    ):
        for number, size in enumerate(sizes):
            optimizer.zero_grad()
            x, trains = torch.randn(size, WIDTH, generator=numbers), number not in evaluates
            losses.append(step(x, trains).reduce_mean().item())
            if trains:
                optimizer.step()
            orders.append([(each.kind, each.microbatch) for each in step._engine._ran[0].actions])
    logging.getLogger("smdistributed").removeHandler(heard)
    return losses, orders, heard.lines


def compare(
    kind: str, sizes: Sequence[int], evaluates: Collection[int] = ()
) -> tuple[bool, list[Any], list[str]]:
    plain, _, _ = train(None, sizes, evaluates)
    losses, orders, lines = train(kind, sizes, evaluates)
    return losses == pytest.approx(plain, rel=1e-6), orders, lines


@pytest.mark.parametrize(
    ("world", "kind"),
    quick(
        itertools.product(WORLDS, SECONDS),
        # Of replicas, see below.
        [("halves", "uneven"), ("halves", "even"), ("whole", "uneven")],
    ),
)
def test_passes_are_ordered_by_what_they_took(worlds: Worlds, world: str, kind: str) -> None:
    ranks = run(worlds, WORLDS[world], compare, kind, [16] * STEPS)
    for same, orders, _ in ranks:
        assert same
        # The fourth step is timed; nothing changes before and after the fifth.
        assert orders[:4] == orders[:1] * 4
        assert orders[4:] == orders[4:5] * (STEPS - 4)
    changed = any(orders[4] != orders[0] for _, orders, _ in ranks)
    if world == "whole" or kind == "uneven":
        assert changed == (world != "whole")
    elif not torch.cuda.is_available():  # there the first order follows from measured operations
        assert not changed
    # What was predicted by operations, and by passes.
    assert [len(lines) for _, _, lines in ranks] == [2] + [0] * (len(ranks) - 1)
    number = 8 if world == "whole" else 4
    assert f"{number} microbatches is predicted to take" in ranks[0][2][1]


def test_only_steps_of_one_kind_that_train_count(worlds: Worlds) -> None:
    """Steps 1 and 3 evaluate, and step 0 has another size, whose order is of its own."""
    args = "uneven", [8] + [16] * (STEPS - 1), (1, 3)
    trained = [2, 4, 5, 6, 7]
    ranks = run(worlds, WORLDS["halves"], compare, *args)
    for same, orders, _ in ranks:
        assert same
        assert [orders[each] for each in trained[:4]] == [orders[2]] * 4
    assert any(orders[7] != orders[2] for _, orders, _ in ranks)


def compare_by_replica(sizes: Sequence[Sequence[int]]) -> tuple[int, bool, list[Any]]:
    own = sizes[smp.dp_rank()]
    same, orders, _ = compare("uneven", own)
    return smp.pp_rank(), same, [orders[at] for at, size in enumerate(own) if size == own[-1]]


def test_replicas_whose_batches_differ_in_kind_do_not_wait(worlds: Worlds) -> None:
    """Both are timed in the seventh step, the first in which a kind comes to each a fourth time."""
    sizes = [16] * (STEPS + 1), [16, 8] * (STEPS // 2) + [16]
    ranks = run(worlds, WORLDS["replicas"], compare_by_replica, sizes)
    for _, same, orders in ranks:
        assert same
        before, after = (7, 2) if len(orders) > STEPS else (4, 1)
        assert orders == orders[:1] * before + orders[-1:] * after
    assert any(orders[-1] != orders[0] for _, _, orders in ranks)
    for stage in range(2):
        one, other = (orders[-1] for place, _, orders in ranks if place == stage)
        assert one == other


def test_microbatches_that_differ_keep_their_order(worlds: Worlds) -> None:
    for same, orders, lines in run(worlds, WORLDS["halves"], compare, "uneven", [13] * STEPS):
        assert same
        assert orders == orders[:1] * STEPS
        assert len(lines) <= 1
