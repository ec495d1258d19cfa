"""Norms for clipping shards: those of the gradients that are used, whatever was done to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from half_cases import adam, batches, net
from reference import own_share
from shard_cases import half_body

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.precision.master_update import MasterUpdate
from smdistributed.modelparallel.torch.sharding.parameter import Shard


def nothing(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    """The next step of a script that does nothing with gradients."""


def changes(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    for each in model.parameters():
        each.grad.mul_(0.5)


def changes_one(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    next(model.parameters()).grad.mul_(0.0)


def clears_one(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    next(model.parameters()).grad = None


def adds(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    again()


def clears_and_adds(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        again()


def clips(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    optimizer.clip_master_grads(0.01)


def clips_and_changes(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    optimizer.clip_master_grads(1e9)
    for each in masters(optimizer):
        each.grad.data.mul_(3.0)  # which no count of changes shows


def changes_what_is_unscaled(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    optimizer.take_gradients()  # as a GradScaler does
    for each in masters(optimizer):
        each.grad.data.mul_(3.0)


def keeps(model: Any, optimizer: Any, again: Callable[[], object]) -> None:
    optimizer.kept = [each.grad for each in model.parameters()]


MOMENTS = (
    *(nothing, changes, changes_one, clears_one, adds),
    *(clears_and_adds, clips, clips_and_changes, changes_what_is_unscaled, keeps),
)


def masters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if each.grad is not None)


def norms_are_of_what_is_used() -> None:
    """Norms that the sums of gradients have brought along are those of a second look."""
    norm_of, known = MasterUpdate._norm, Shard.known_square
    found: list[bool] = []
    pairs: list[tuple[float, float]] = []

    def noted(self: Shard, gradient: torch.Tensor) -> torch.Tensor | None:
        square = known(self, gradient)
        found.append(square is not None)
        return square

    def both(self: MasterUpdate, norm_type: float) -> torch.Tensor:
        norm = norm_of(self, norm_type)
        with mock.patch.object(Shard, "known_square", return_value=None):
            pairs.append((norm.item(), norm_of(self, norm_type).item()))
        return norm

    used = {}
    for moment in MOMENTS:
        model = smp.DistributedModel(net())
        optimizer = smp.DistributedOptimizer(adam(model.parameters()))
        step = smp.step(half_body)
        found.clear()
        with (
            mock.patch.object(Shard, "known_square", noted),
            mock.patch.object(MasterUpdate, "_norm", both),
        ):
            for data in batches(3):
                share = own_share(data, [0, 0])
                optimizer.zero_grad()
                step(model, *share)
                moment(
                    model,
                    optimizer,
                    lambda step=step, model=model, share=share: step(model, *share),
                )
                optimizer.step()
        used[moment.__name__] = sum(found)
    assert len(pairs) == 3 * (len(MOMENTS) + 2)  # two of them clip themselves
    for got, want in pairs:
        assert got == pytest.approx(want, rel=1e-6)
    # With several microbatches the sums of one are not those of all.
    is_known = smp.state.cfg.microbatches == 1 and smp.dp_size() == 2
    assert bool(used["nothing"]) == is_known, used
    assert not any(used[each] for each in ("changes", "adds", "keeps")), used
    assert not is_known or used["changes_one"] < used["nothing"], used
