"""Shards that ranks read from each other's memory, on the CPU from files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import shard_cases
import shard_population
import torch
from copy_cases import folder
from half_cases import batches, fused, net
from reference import own_share
from shared_files import FileMemory
from torch import nn
from trained_beside import body
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.collectives.alternating_buffers import AlternatingBuffers
from smdistributed.modelparallel.torch.precision import master_update, one_pass_adam
from smdistributed.modelparallel.torch.precision.one_pass_adam import OnePassAdam
from smdistributed.modelparallel.torch.precision.split_master import is_split
from smdistributed.modelparallel.torch.sharding import home
from smdistributed.modelparallel.torch.sharding.row_sums import RowSums, WrittenParcels
from smdistributed.modelparallel.torch.sharding.shard_memory import ReadShards
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups

#: Files stand for memory of GPUs.
by_files = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have memory of their own")
BATCH = torch.linspace(-1, 1, 64).view(8, 8)


@contextlib.contextmanager
def read() -> Iterator[list[ReadShards | RowSums]]:
    """Has models made inside read each other's shards and gradients; gives what these lie in."""
    made: list[ReadShards | RowSums] = []
    with folder() as where:

        def memory(groups: ShardingGroups, device: torch.device) -> ReadShards:
            talk = groups.collectives
            found = ReadShards(
                lambda size: FileMemory(size, where, talk), groups.degree, groups.index
            )
            made.append(found)
            return found

        def sums(groups: ShardingGroups, device: torch.device, most: int) -> RowSums:
            talk = groups.collectives
            buffers = AlternatingBuffers(
                lambda size: FileMemory(size, where, talk), talk, lambda: None
            )
            made.append(RowSums(groups, WrittenParcels(groups, buffers)))
            return made[-1]

        with (
            mock.patch.object(home, "shard_memory", memory),
            mock.patch.object(home, "row_sums", sums),
        ):
            yield made


def shards(name: str) -> None:
    """A case of shards, with shards that are read."""
    with read() as made:
        {**shard_cases.CASES, **shard_cases.HALF, **shard_cases.FP16}[name]()
        assert made


def survey() -> dict[str, Any]:
    with read():
        return shard_population.survey()


@contextlib.contextmanager
def slow_copies(is_slow: bool) -> Iterator[None]:
    """Every copy takes its time on a rank that is slow."""
    copy = torch.Tensor.copy_

    def copy_slowly(self: torch.Tensor, *args: Any) -> torch.Tensor:
        time.sleep(0.005)
        return copy(self, *args)

    with mock.patch.object(torch.Tensor, "copy_", copy_slowly if is_slow else copy):
        yield


def write_own(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Writes what this rank has, and waits for nobody."""
    with torch.no_grad():
        for name, each in model.get_module().named_parameters():
            if not home.is_sharded(each):  # it is whole on every rank
                each.copy_(state[name])
                continue
            part = each.shard.part
            each.shard.values.copy_(state[name][part.within(type(part).whole(each.shape))])


def nobody_writes_what_others_read() -> None:
    """Values change between two calls without a backward pass; each call sees those of its time."""
    with read():
        reference, model = net(), smp.DistributedModel(net())
    draws = generator(3)
    states = [
        {
            name: torch.randn(each.shape, generator=draws)
            for name, each in reference.state_dict().items()
        }
        for _ in range(3)
    ]
    forward = smp.step(lambda model, inputs: model(inputs))
    for number in range(8):
        state, is_slow = states[number % 3], smp.rank() == number // 2 % 2
        reference.load_state_dict(state)
        with slow_copies(is_slow and number % 4 == 0):
            write_own(model, state)
        with slow_copies(is_slow):
            got = forward(model, BATCH).concat() if number % 2 else model(BATCH)
        assert torch.allclose(got.detach(), reference(BATCH).detach(), rtol=1e-5, atol=1e-6), number


def ranks_may_read_less() -> None:
    """What a rank does not use it does not read, and its peers need not wait for it."""
    with read():
        model = smp.DistributedModel(shard_cases.Turned())
        _read_less(model)


def _read_less(model: Any) -> None:
    module = model.get_module()
    whole = shard_cases.Turned()
    whole.load_state_dict(model.state_dict())

    def loss_of(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).square().mean()

    @smp.step
    def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, inputs)
        model.backward(loss)
        return loss

    forward = smp.step(lambda model, inputs: model(inputs))
    orders = [[1], [2, 0, 3, 1], [], [0]][: smp.dp_size()]
    for _ in range(3):
        module.order = whole.order = orders[smp.dp_rank()]
        got = forward(model, BATCH).concat()
        assert torch.allclose(got.detach(), whole(BATCH).detach(), rtol=1e-5, atol=1e-6)
    train(model, BATCH)
    for order in orders:
        whole.order = order
        (loss_of(whole, BATCH) / len(orders)).backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 1e9) for each in (model, whole)]
    assert torch.allclose(*norms, rtol=1e-5)


def updated_in_one_pass() -> None:
    """An update in one pass over memory is one by torch's kernel, to rounding."""
    takes, losses, norms = OnePassAdam.takes, [], []
    used: list[int] = []

    def check(optimizer: Any, device: torch.device) -> bool:
        return takes(optimizer, torch.device("cuda"))

    def smaller(copies: Any, factor: Any) -> OnePassAdam:
        used.append(len(copies))
        return OnePassAdam(copies, factor, smallest=8)

    for one_pass in (False, True):
        model = smp.DistributedModel(net())
        step = smp.step(body)
        smaller.takes = check if one_pass else lambda *_: False  # type: ignore[attr-defined]
        smaller.is_worth = lambda source: source.numel() >= 8  # type: ignore[attr-defined]
        with (
            mock.patch.object(master_update, "OnePassAdam", smaller),
            mock.patch.object(one_pass_adam, "has_kernel", return_value=True),
        ):
            optimizer = smp.DistributedOptimizer(fused(model.parameters()))
            for data in batches(6):
                optimizer.zero_grad()
                losses.append(step(model, *own_share(data, [0, 0])).reduce_mean().item())
                optimizer.step()
        if smp.state.cfg.bf16:
            masters = [each for group in optimizer.param_groups for each in group["params"]]
            assert any(map(is_split, masters)) is one_pass
            # A checkpoint has masters whole, which stay as they are.
            for each in optimizer.local_state_dict()["state"].values():
                assert each["master"].dtype is torch.float32
            assert any(map(is_split, masters)) is one_pass
        norms += [each.float().norm() for each in model.state_dict().values()]
    assert len(used) == 6
    half = len(losses) // 2
    torch.testing.assert_close(losses[:half], losses[half:], rtol=1e-3, atol=1e-4)
    half = len(norms) // 2
    torch.testing.assert_close(norms[:half], norms[half:], rtol=1e-2, atol=1e-4)
