from __future__ import annotations

import contextlib

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.errors import PartitionError, UnsupportedError
from smdistributed.modelparallel.torch.planning.changed_buffers import check_shared
from smdistributed.modelparallel.torch.record.ir import NodeKind
from smdistributed.modelparallel.torch.stepping.placing import idle_partitions, kept_whole

WIDTH = 4


class Net(nn.Module):
    """Calls what a ModuleList and a ModuleDict hold; they themselves are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drops = nn.ModuleDict({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)})
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.drops["ab"[index % 2]](layer(x)) + self.offset
        return x


def test_modules_in_uncalled_containers_are_recorded_whole() -> None:
    """Their hooks, and the random streams that hang on them, work only then."""
    module = Net()
    recorded = Recorded(module, {"layers.0": 0, "layers.3": 1})
    graph = recorded.way(module, torch.ones(2, WIDTH)).graph
    leaves = [node.name for node in graph.nodes if node.kind is NodeKind.LEAF]
    expected = [name for i in range(4) for name in (f"layers.{i}", f"drops.{'ab'[i % 2]}")]
    assert leaves == expected
    assert not [node for node in graph.nodes if node.draw]
    assert recorded.placement is not None
    assert module not in recorded.placement.leaves


def test_only_the_outermost_called_module_is_a_leaf() -> None:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
    module = nn.Sequential(*blocks)
    graph = Recorded(module, {}).way(module, torch.ones(2, WIDTH)).graph
    assert [node.name for node in graph.nodes if node.kind is NodeKind.LEAF] == list("01234567")


def test_fixed_partitions_are_kept_and_own_their_parameters() -> None:
    module = Net()
    fixed = {"layers.0": 1, "layers.1": 0, "layers.2": 1, "layers.3": 0}
    recorded = Recorded(module, fixed)
    placement = recorded.place(module, torch.ones(2, WIDTH))
    modules = dict(module.named_modules())
    for name, index in fixed.items():
        assert placement.partition_of[modules[name]] == index
        assert placement.owner_of((modules[name], "weight")) == index
        assert not placement.is_everywhere((modules[name], "weight"))
    assert placement.is_everywhere((module, "offset"))


class Masked(nn.Linear):
    """Reads a buffer that others may have, too, or changes it."""

    def __init__(self, mask: torch.Tensor, *, changes: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", mask)
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.mask.data.mul_(0.5)
        return super().forward(x) * self.mask


@pytest.mark.parametrize("changes", [False, True])
def test_each_partition_has_a_copy_of_a_shared_buffer_that_nothing_changes(changes: bool) -> None:
    mask = torch.ones(WIDTH)
    layers = [Masked(mask), Masked(torch.ones(WIDTH)), Masked(mask, changes=changes)]
    module = nn.Sequential(*layers)
    recorded = Recorded(module, {"0": 0, "1": 1, "2": 1})
    graph = recorded.way(module, torch.ones(2, WIDTH)).graph
    placement = recorded.placement
    assert placement is not None
    found = [placement.is_everywhere((layer, "mask")) for layer in layers]
    assert found == [True, False, True]
    refused = pytest.raises(
        UnsupportedError, match=r"2 changes Masked\.mask, a buffer that modules"
    )
    with refused if changes else contextlib.nullcontext():
        check_shared(graph, placement.is_shared)


def test_shared_parameters_stay_together() -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    module[3].weight = module[0].weight
    placement = Recorded(module, {}).place(module, torch.ones(2, WIDTH))
    assert placement.partition_of[module[0]] == placement.partition_of[module[3]]
    assert {placement.partition_of[layer] for layer in module} == {0, 1}
    with pytest.raises(PartitionError):
        Recorded(module, {"0": 0, "3": 1}).place(module, torch.ones(2, WIDTH))


class Branch(nn.Module):
    """Calls a module that another branch has, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.own(x))


@pytest.mark.parametrize(
    "shared", [nn.PReLU(), nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.BatchNorm1d(WIDTH)]
)
def test_a_module_of_two_parents_is_where_both_call_it(shared: nn.Module) -> None:
    module = nn.Sequential(*(Branch(shared) for _ in range(4)))
    recorded = Recorded(module, {})
    placement = recorded.place(module, torch.ones(2, WIDTH))
    assert {placement.partition_of[branch.own] for branch in module} == {0, 1}
    for branch in module:
        whole = next((each for each in (branch, shared) if each in placement.leaves), None)
        assert (
            whole is not branch
            or placement.partition_of[branch] == (placement.partition_of[shared])
        )


def test_an_activation_without_weights_holds_no_blocks_together() -> None:
    shared = nn.ReLU()
    module = nn.Sequential(*(Branch(shared) for _ in range(4)))
    placement = Recorded(module, {}).place(module, torch.ones(2, WIDTH))
    assert [placement.partition_of[branch] for branch in module] == [0, 0, 1, 1]


class Deciding(nn.Linear):
    """Does something else for other numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum() > 0 else 1)


class DecidingBetween(nn.Sequential):
    """Decides itself, between its modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
            x = x if x.sum() > 0 else -x
        return x


def test_a_model_is_split_around_a_module_that_decides_by_its_input() -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    module = nn.Sequential(layers[0], Deciding(WIDTH, WIDTH), *layers[1:])
    placement = Recorded(module, {}).place(module, torch.ones(2, WIDTH))
    assert list(placement.assignment.units.values()) == [0, 0, 1, 1]
    assert not idle_partitions(placement.assignment)


def test_partitions_that_stay_empty_are_named() -> None:
    module = nn.Sequential(DecidingBetween(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    recorded = Recorded(module, {})
    profile = recorded.passes(module, torch.ones(2, WIDTH)).profile
    assert recorded.placement is not None
    assert idle_partitions(recorded.placement.assignment) == [1]
    (reason,) = kept_whole(profile)
    assert reason.startswith("DecidingBetween is kept whole: ")
