"""PyTorch: the order of work, and who does it, seen from outside."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from conformance.adapters.base import WIDTH
from conformance.cases.torch.model import mean_square, trained
from conformance.registry import torch_case

MICROBATCHES = 4


def most_in_flight(adapter: Any) -> int:
    """Returns how many microbatches have at most been forward and not yet backward on rank 0."""
    model = adapter.model()
    for index, layer in enumerate(model.get_module().layers):
        adapter.smp.set_partition(layer, index // 2)
    step = adapter.smp.step(mean_square)
    step(model, adapter.tensor(adapter.batch(8)))
    now = most = 0
    for each in step.timeline().ranks[0]:
        now += 1 if each.action.kind.name == "FORWARD" else -1
        most = max(most, now)
    return most


@torch_case("config.active_microbatches", worlds=("one_active", "two_active"))
def no_more_microbatches_are_in_flight_than_are_allowed(adapter: Any) -> None:
    allowed = adapter.smp.state.cfg.active_microbatches
    assert most_in_flight(adapter) == allowed


@torch_case("config.pipeline", "config.active_microbatches", worlds=("manual",))
def a_simple_schedule_has_all_microbatches_in_flight(adapter: Any) -> None:
    assert most_in_flight(adapter) == MICROBATCHES


@torch_case("config.pipeline", worlds=("pipeline", "manual"))
def a_timeline_has_each_action_once_in_the_order_of_time(adapter: Any) -> None:
    step = adapter.smp.step(mean_square)
    step(adapter.model(), adapter.tensor(adapter.batch(8)))
    for actions in step.timeline().ranks:
        spans = [(each.start, each.end) for each in actions]
        assert len({each.action for each in actions}) == len(actions)
        assert spans == sorted(spans)
        assert all(0 <= start <= end < 60 for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


# The partition


@torch_case("torch.partition_tree", worlds=("deep",))
def a_long_chain_is_divided_evenly(adapter: Any) -> None:
    from torch import nn

    def counts(net: Any) -> list[int]:
        model, _ = trained(adapter, adapter.smp.DistributedModel(net))
        own = len([1 for name, _ in model.local_named_parameters() if name.endswith("weight")])
        found: list[int] = adapter.smp.allgather(own, adapter.smp.PP_GROUP)
        return found

    def chain(length: int) -> Any:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(length)))

    assert counts(chain(8)) == [2, 2, 2, 2]
    assert sorted(counts(chain(11))) == [2, 3, 3, 3]
    # A container that is too heavy for one partition is opened.
    assert counts(nn.Sequential(chain(6), nn.Linear(WIDTH, WIDTH), chain(1))) == [2, 2, 2, 2]


def table(rows: int) -> Any:
    """Returns a module of parameters that cost no work."""
    import torch
    from torch import nn

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.zeros(rows, WIDTH))

        def forward(self, x: Any) -> Any:
            return x + self.rows[0]

    return Table()


def least_of_the_heaviest(weights: Sequence[int], parts: int) -> int:
    """Returns how light the heaviest part can be; tries every way to cut."""
    ends = range(1, len(weights))
    return min(
        max(sum(weights[one:two]) for one, two in itertools.pairwise((0, *cuts, len(weights))))
        for cuts in itertools.combinations(ends, parts - 1)
    )


@torch_case("torch.partition_tree", worlds=("deep", "by_memory"))
def no_cut_of_a_chain_has_a_lighter_heaviest_part(adapter: Any) -> None:
    from torch import nn

    smp = adapter.smp
    numbers = random.Random(1)
    for _ in range(8):
        weights = [numbers.randint(1, 9) for _ in range(numbers.randint(smp.pp_size(), 10))]
        net = nn.Sequential(*(table(1000 * each) for each in weights))
        model, _ = trained(adapter, smp.DistributedModel(net))
        own = [int(name.partition(".")[0]) for name, _ in model.local_named_parameters()]
        held = smp.allgather(own, smp.PP_GROUP)
        assert [place for each in held for place in each] == list(range(len(weights)))
        heaviest = max(sum(weights[place] for place in each) for each in held)
        assert heaviest == least_of_the_heaviest(weights, smp.pp_size()), (weights, held)


def uneven_net() -> Any:
    """Returns a model with its parameters at the front, and its work at the end.

    Two tables of parameters that cost no work, and two works without parameters.
    """
    from torch import nn

    class Work(nn.Module):
        def forward(self, x: Any) -> Any:
            wide = x.repeat(1, 20)
            for _ in range(20):
                wide = (wide @ wide.T) @ wide / 1e3
            return wide[:, :WIDTH]

    return nn.Sequential(table(5000), table(5000), Work(), Work())


def shares(adapter: Any) -> tuple[list[int], list[int]]:
    """Returns the ranks of the tables, and those of the works."""
    model, _ = trained(adapter, adapter.smp.DistributedModel(uneven_net()))
    own = {name for name, _ in model.local_named_modules()}
    found = adapter.smp.allgather(own, adapter.smp.PP_GROUP)
    places = [[rank for rank, names in enumerate(found) if str(i) in names] for i in range(4)]
    ranks = [rank for (rank,) in places]
    return ranks[:2], ranks[2:]


@torch_case("config.memory_weight", "torch.partition_tree", worlds=("by_memory",))
def a_partition_by_memory_divides_the_parameters(adapter: Any) -> None:
    tables, _ = shares(adapter)
    assert sorted(tables) == [0, 1]


@torch_case("config.memory_weight", "torch.partition_tree", worlds=("by_work",))
def a_partition_by_work_divides_the_work(adapter: Any) -> None:
    tables, works = shares(adapter)
    assert tables[0] == tables[1]
    assert sorted(works) == [0, 1]


@torch_case("config.skip_tracing", worlds=("untraced",))
def without_a_trace_parameters_alone_are_divided(adapter: Any) -> None:
    tables, _ = shares(adapter)
    assert sorted(tables) == [0, 1]
