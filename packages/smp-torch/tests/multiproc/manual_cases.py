"""Partitions that the user fixes: steps must give the same numbers, on those partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality_cases import WIDTH, Block, batch, mlp, predict_tokens, regress
from reference import compare
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import PartitionError


def partition_of(model: smp.DistributedModel, *names: str) -> dict[str, int]:
    modules = dict(model.get_module().named_modules())
    return {name: model.holder.placement.partition_of[modules[name]] for name in names}


def case_partition_contexts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            with smp.partition(1):
                self.middle = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
                with smp.partition(0):
                    self.middle.append(Block())
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.middle(self.first(x)))

    model = compare(Model, regress, [batch(), batch()])
    fixed = {"first": 0, "middle.0": 1, "middle.1": 1, "middle.2": 0, "last": 0}
    assert partition_of(model, *fixed) == fixed


def case_set_partition() -> None:
    def build() -> nn.Module:
        module = mlp(3)
        for index, partition in enumerate((1, 0, 0, 1, 0, 1, 1)):
            smp.set_partition(module[index], partition)
        return module

    # A reference is a copy, so what was fixed for the module does not concern it.
    model = compare(build, regress, [batch(), batch()])
    expected = dict(zip("0123456", (1, 0, 0, 1, 0, 1, 1), strict=True))
    assert partition_of(model, *expected) == expected


def case_the_outer_assignment_is_that_of_everything_below() -> None:
    def build() -> nn.Module:
        inner = nn.Sequential(Block(), Block())
        smp.set_partition(inner, 1)
        smp.set_partition(inner[0], 0)
        return nn.Sequential(Block(), inner)

    model = compare(build, regress, [batch()])
    expected = {"0": 0, "1.0": 0, "1.1": 1}
    assert partition_of(model, *expected) == expected


def case_tied_head_on_the_first_partition() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, WIDTH)
            with smp.partition(1):
                self.block = Block()
            self.head = nn.Linear(WIDTH, 11)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.head(self.block(self.embedding(tokens)))

    compare(Model, predict_tokens, [[torch.randint(11, (8, 6))] for _ in range(2)])


def case_tied_modules_on_two_partitions_are_an_error() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    module[1].weight = module[0].weight
    smp.set_partition(module[0], 0)
    smp.set_partition(module[1], 1)
    step, model = smp.step(regress), smp.DistributedModel(module)
    with pytest.raises(PartitionError):
        step(model, *batch())


def case_an_index_out_of_range_is_an_error() -> None:
    with pytest.raises(PartitionError, match=r"0 \.\. 1"):
        smp.set_partition(nn.Linear(1, 1), 2)
    with pytest.raises(PartitionError, match=r"0 \.\. 1"), smp.partition(-1):
        raise AssertionError("the context was entered")


def case_everything_on_one_partition() -> None:
    def build() -> nn.Module:
        module = mlp()
        smp.set_partition(module, 1)
        return module

    torch.manual_seed(1)
    model = smp.DistributedModel(build())
    step = smp.step(regress)
    loss = step(model, *batch()).reduce_mean()
    assert loss.isfinite()
    assert bool(list(model.local_parameters())) is (smp.pp_rank() == 1)


def cases() -> dict[str, Callable[[], Any]]:
    """Returns the cases of this module by name."""
    return {
        name.removeprefix("case_"): value
        for name, value in globals().items()
        if name.startswith("case_")
    }
