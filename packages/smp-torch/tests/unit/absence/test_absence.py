"""Absent tensors: what is computed with them, and what two ranks find out together."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.common.errors import CommError, UnsupportedError
from smdistributed.modelparallel.torch.absence import following, tensors
from smdistributed.modelparallel.torch.absence.forms import Forms
from smdistributed.modelparallel.torch.absence.given import GivenData
from smdistributed.modelparallel.torch.absence.notes import Origin
from smdistributed.modelparallel.torch.absence.optimizers import cleared_unseen
from smdistributed.modelparallel.torch.absence.owned import Owned, OwnedTensor, own_up
from smdistributed.modelparallel.torch.absence.sharing import MemorySharers
from smdistributed.modelparallel.torch.absence.tensors import (
    AbsentTensor,
    gradients_hidden,
    is_vacant,
    make_absent,
    make_present,
    note_gradient,
)
from smdistributed.modelparallel.torch.absence.values import Question, answer
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.runtime.codec import TORCH_CODEC
from smdistributed.modelparallel.torch.runtime.published import NotPublishedError, Published

CPU = torch.device("cpu")


class Pipeline:
    """Two ranks, as threads of this process."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=5)
        self._told: list[Any] = [None, None]
        self.store = dist.HashStore()

    def exchange(self, own: int, mine: Any) -> list[Any]:
        # As between processes: no thread has the tensors of another one.
        self._told[own] = TORCH_CODEC.dumps(mine)
        try:
            self._barrier.wait()
            told = [
                mine if rank == own else TORCH_CODEC.loads(each)
                for rank, each in enumerate(self._told)
            ]
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CommError("nobody came", rank=own) from error
        return told


class Rank:
    """A rank that has one of two parameters; a keeper.

    Args:
        own: its number.
        pipeline: of two ranks that run; by default the other one does not come.
    """

    def __init__(self, own: int, pipeline: Pipeline | None = None) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._own, self._pipeline = own, pipeline or Pipeline()
        store = self._pipeline.store
        self._published = Published(store, own, (0, 1), 5, lambda: ())
        if pipeline is None:
            Published(store, 1 - own, (0, 1), 5, lambda: ()).note_call("", (0, 1))
        numbers = torch.Generator().manual_seed(5)
        values = [torch.randn(3, 4, generator=numbers) for _ in range(2)]
        self.parameters = [nn.Parameter(each) for each in values]
        self.sharing_memory = MemorySharers().of
        self.run = following.run
        self.given = GivenData()
        self.needs_values = Forms(self.fake_mode).depend_on_values
        mine, absent = self.parameters[own], self.parameters[1 - own]
        make_absent(absent, self, origin(1 - own), absent.shape, CPU)
        own_up(mine, Owned(self, origin(own), is_own=True))

    def is_here(self, tensor: torch.Tensor) -> bool:
        return tensor is self.parameters[self._own]

    def is_of_library(self) -> bool:
        return False

    def check_use(self, names: str, what: str) -> None:
        pass

    def leave(self, place: str, values: torch.Tensor) -> None:
        self._published.leave(place, values)

    def answer(self, question: Question) -> torch.Tensor:
        if question.owner == 1 - self._own:
            try:
                return self._published.take(1 - self._own, question.place)
            except NotPublishedError as error:
                raise question.refusal() from error
        return answer(
            question, lambda mine: self._pipeline.exchange(self._own, mine), self._own, CPU
        )


def origin(number: int) -> Origin:
    return Origin(frozenset({f"parameter {number}"}), frozenset({number}), str(number))


def on_both(body: Callable[[Rank], Any]) -> list[Any]:
    """Runs a body on two ranks at once."""
    pipeline = Pipeline()
    Rank(0)  # the first one has torch know a key, which threads must not do at once
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda own: body(Rank(own, pipeline)), range(2)))


def whole() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(5)
    return [torch.randn(3, 4, generator=numbers) for _ in range(2)]


def norm_by_items(rank: Rank) -> float:
    total = 0.0
    for each in rank.parameters:
        total += each.detach().norm().item() ** 2
    return float(total**0.5)


@pytest.mark.parametrize(
    "compute",
    [
        lambda rank: float(torch.stack([each.norm() for each in rank.parameters]).norm()),
        norm_by_items,
    ],
)
def test_what_all_ranks_have_a_part_of_is_computed_together(compute: Any) -> None:
    wanted = torch.cat(whole()).norm().item()
    assert on_both(compute) == pytest.approx([wanted, wanted])


def test_what_was_computed_once_is_known() -> None:
    def compute(rank: Rank) -> torch.Tensor:
        scale = 1 / torch.stack([each.detach().norm() for each in rank.parameters]).norm()
        assert scale < 1
        own = rank.parameters[rank._own].detach()
        return own.mul(1.0).mul_(scale) if isinstance(own, AbsentTensor) else own * scale

    found = on_both(compute)
    assert all(isinstance(each, AbsentTensor) for each in found)


@pytest.mark.parametrize("number", [0, 1])
def test_what_one_rank_alone_asks_for_is_refused(number: int) -> None:
    rank = Rank(1 - number)
    with pytest.raises(UnsupportedError, match=f"parameter {number}.*state_dict"):
        bool(rank.parameters[number].norm() > 1)


def test_what_has_changed_since_is_refused() -> None:
    def compute(rank: Rank) -> float:
        own = torch.ones(3, 4)
        total = sum(each.norm() for each in (*rank.parameters, own))
        rank.parameters[1 - rank._own].data.mul_(2)
        summand = own.mul(1)
        late = total + summand.sum()
        summand.add_(1)
        return float(late)

    wanted = sum(each.norm() for each in whole()).item() + 12**0.5 + 12
    assert on_both(compute) == pytest.approx([wanted, wanted])

    def too_late(rank: Rank) -> float:
        offset = torch.ones(())
        total = sum(each.norm() for each in rank.parameters) + offset
        offset.add_(1)
        return float(total)

    with pytest.raises(UnsupportedError, match="parameter"):
        on_both(too_late)


def test_generators_stand_as_where_the_values_are() -> None:
    rank = Rank(0)
    torch.manual_seed(1)
    nn.init.kaiming_uniform_(rank.parameters[1])
    found = torch.rand(3)
    torch.manual_seed(1)
    nn.init.kaiming_uniform_(whole()[1])
    assert torch.equal(found, torch.rand(3))


def test_shapes_and_errors_are_those_of_the_values() -> None:
    absent = Rank(0).parameters[1]
    assert isinstance(absent, nn.Parameter)
    assert (absent.shape, absent.numel(), absent.dtype) == ((3, 4), 12, torch.float32)
    assert (absent @ torch.ones(4, 2)).shape == (3, 2)
    assert absent.data[0].add_(1).shape == (4,)
    assert copy.deepcopy(absent).requires_grad
    with pytest.raises(RuntimeError, match="dim"):
        absent @ torch.ones(3, 2)
    with pytest.raises(UnsupportedError, match=r"memory of parameter 1.*state_dict"):
        absent.untyped_storage()
    with pytest.raises(UnsupportedError, match="backward"):
        absent.square().sum().backward()


def test_what_is_written_to_a_tensor_of_the_script() -> None:
    rank = Rank(0)
    mean = torch.zeros(3, 4)
    mean.data.lerp_(rank.parameters[1].data, 0.1)
    assert isinstance(mean, AbsentTensor)
    rank.parameters[1].data.copy_(mean)
    with pytest.raises(UnsupportedError, match="a part of a tensor"):
        torch.zeros(6, 4)[:3].copy_(rank.parameters[1].data)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="parameter 1"):
        rank.parameters[0].copy_(rank.parameters[1])


@torch.no_grad()
def test_functions_of_many_run_on_those_that_are_here() -> None:
    parameters, (first, _) = Rank(0).parameters, whole()
    twos = [torch.full_like(each, 2.0) for each in parameters]
    torch._foreach_add_(parameters, twos, alpha=-0.5)
    assert torch.equal(parameters[0], first - 1)
    norms = torch._foreach_norm(parameters)
    assert torch.equal(norms[0], (first - 1).norm())
    mean = torch.zeros(3, 4)
    torch._foreach_lerp_([mean], parameters[1:], 0.1)
    assert isinstance(mean, AbsentTensor)


def test_gradients_show_but_to_optimizers() -> None:
    absent = Rank(0).parameters[1]
    assert absent.grad is None
    note_gradient(absent)
    assert isinstance(absent.grad, AbsentTensor)
    with gradients_hidden():
        assert absent.grad is None
    absent.grad.mul_(2)
    absent.grad = None
    assert absent.grad is None


def test_values_come_back() -> None:
    rank = Rank(0)
    (_, values), absent = whole(), rank.parameters[1]
    rank.parameters[0].data = absent.data  # nothing sees this
    assert is_vacant(rank.parameters[0])
    make_present(absent, values)
    assert type(absent) is nn.Parameter
    assert torch.equal(absent, values)


def test_gradients_that_nobody_has_seen_are_cleared_unseen() -> None:
    rank = Rank(0)
    here, absent = rank.parameters
    here.grad = torch.ones_like(here)
    note_gradient(absent)
    with (
        mock.patch.object(tensors, "new_gradient", side_effect=AssertionError),
        cleared_unseen(rank.parameters),
    ):
        for each in rank.parameters:
            if each.grad is not None:
                each.grad = None
    assert here.grad is None
    assert absent.grad is None
    note_gradient(absent)
    assert absent.grad is not None


@pytest.mark.parametrize(
    "road",
    [
        lambda each: torch.func.vmap(torch.sum)(each).norm(),
        lambda each: torch.func.vmap(lambda factor: (factor * each).sum())(torch.ones(3)).sum(),
        lambda each: torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(each).sum(),
        lambda each: torch.Tensor._make_subclass(torch.Tensor, each.detach()).norm(),
    ],
)
def test_roads_past_functions_of_torch_are_exact_or_refused(road: Any) -> None:
    rank = Rank(0)
    with pytest.raises(UnsupportedError, match="another partition"):
        float(road(rank.parameters[1]))
    plain = whole()
    found = on_both(lambda each: _told(lambda: float(sum(map(road, each.parameters)))))
    wanted = float(sum(map(road, plain)))
    assert all(each is None or abs(each - wanted) < 1e-4 for each in found)


def _told(number: Callable[[], float]) -> float | None:
    with contextlib.suppress(UnsupportedError):
        return number()
    return None


def test_nothing_of_an_absent_tensor_can_be_read_by_a_kernel() -> None:
    (absent,) = Rank(0).parameters[1:]
    hidden = torch.empty(3, 4)
    hidden.data = tensors.vacant(absent, CPU)
    with pytest.raises(UnsupportedError, match="another partition has, by way of its data"):
        hidden.sum()
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"), pytest.deprecated_call():
        torch.jit.trace(torch.sin, absent)
    with pytest.raises(UnsupportedError, match="sparse or nested"):
        absent.to_sparse()


@pytest.mark.parametrize(
    "read",
    [
        lambda each: each.norm().item(),
        lambda each: float(f"{each.detach().sum():.3f}"),
        lambda each: bool(torch.isfinite(each).all()),
        lambda each: each.tolist(),
        lambda each: each[each > 0].sum().item(),
        lambda each: each.data.nonzero().shape[0],
        lambda each: float(each.detach().numpy().sum()),
        lambda each: [float(row.sum()) for row in each.detach()],
        lambda each: copy.deepcopy(each).data.mul_(2).sum().item(),
        lambda each: torch.zeros_like(each).add_(each).sum().item(),
        lambda each: float(torch._foreach_norm([each.detach(), torch.ones(2)])[0]),
        lambda each: torch.equal(each, each * 1),
    ],
)
def test_what_python_reads_comes_from_the_rank_that_has_it(read: Any) -> None:
    wanted = [read(nn.Parameter(each)) for each in whole()]
    for found in on_both(lambda rank: [read(each) for each in rank.parameters]):
        assert found == wanted


def test_a_parameter_may_be_given_what_ranks_compute_together() -> None:
    def compute(rank: Rank) -> float:
        mine, other = rank.parameters
        mine.data = 0.9 * mine.data + 0.1 * other.data
        rank.given.check()
        return mine.sum().item()

    wanted = (0.9 * whole()[0] + 0.1 * whole()[1]).sum().item()
    assert on_both(compute) == pytest.approx([wanted, wanted])


@pytest.mark.parametrize(
    "write",
    [
        lambda mine, other: mine.data.lerp_(other.data, 0.1),
        lambda mine, other: mine.data.mul_(0.9).add_(other.detach(), alpha=0.1),
        lambda mine, other: mine.detach().data.copy_(0.9 * mine.data + 0.1 * other.data),
        lambda mine, other: torch._foreach_lerp_([mine.data], [other.data], 0.1),
    ],
)
def test_what_sees_all_of_a_parameter_may_be_written_to(write: Any) -> None:
    def compute(rank: Rank) -> float:
        mine, other = rank.parameters
        before = mine.sum().item()
        write(mine, other)
        assert type(rank.parameters[rank._own]) is OwnedTensor
        return mine.sum().item() - before

    mine, other = whole()
    wanted = (mine.lerp(other, 0.1) - mine).sum().item()
    assert on_both(compute) == pytest.approx([wanted, wanted], abs=1e-5)


def test_arguments_that_are_computed_from_parameters_come_to_all_ranks() -> None:
    def compute(rank: Rank) -> list[list[float]]:
        mine, other = rank.parameters
        made = [mine.data.mul(2), torch.ones(2), mine.data + other.data, other.data]
        following.bring_arguments(made)
        assert [type(each) is torch.Tensor for each in made] == [True, True, True, False]
        return [each.tolist() for each in made[:3]]

    mine, other = whole()
    wanted = [each.tolist() for each in (mine * 2, torch.ones(2), mine + other)]
    assert on_both(compute) == [wanted, wanted]


def test_a_part_of_a_parameter_is_not_written_to() -> None:
    rank = Rank(0)
    mine, other = rank.parameters
    with pytest.raises(UnsupportedError, match="to a part of a tensor"):
        mine.data[0].copy_(other.data[0])


def test_what_a_parameter_was_given_is_not_written_to_or_given_again() -> None:
    def compute(rank: Rank) -> None:
        mine, other = rank.parameters
        together = mine.data + other.data
        mine.data = together
        with pytest.raises(UnsupportedError, match="two parameters were given"):
            other.data = together
        together.mul_(2)
        with pytest.raises(UnsupportedError, match="was written to after"):
            rank.given.check()
        rank.given.check()

    on_both(compute)


def test_a_rank_reads_what_it_has_by_itself() -> None:
    def compute(rank: Rank) -> float:
        own = rank.parameters[rank._own].detach()
        for _ in range(rank._own + 1):
            assert own.norm().item() > 0
        own.mul_(2)
        return rank.parameters[0].detach().sum().item()

    wanted = 2 * whole()[0].sum().item()
    assert on_both(compute) == pytest.approx([wanted, wanted])


def test_a_read_of_another_moment_is_not_taken_for_that_of_this_one() -> None:
    def compute(rank: Rank) -> float:
        found = 0.0
        for moment in range(3):
            with torch.no_grad():
                rank.parameters[0].mul_(2)
            if rank._own == 0 or moment == 2:
                found = rank.parameters[0].sum().item()
        return found

    wanted = 8 * whole()[0].sum().item()
    assert on_both(compute) == pytest.approx([wanted, wanted])


def test_what_is_computed_from_what_a_rank_has_is_known_to_be_its_own() -> None:
    rank = Rank(0)
    own = rank.parameters[0]
    assert isinstance(own, nn.Parameter)
    mean = torch.zeros(3, 4)
    view = mean.view(-1)
    with torch.no_grad():
        mean.lerp_(own, 0.1)
    for each in (own * 2, own.data, mean, view, own[0], copy.deepcopy(own)):
        assert type(each) is OwnedTensor
    assert type(torch.zeros_like(own)) is torch.Tensor
    torch.testing.assert_close(own.detach(), nn.Parameter(whole()[0]))
    assert isinstance(own + rank.parameters[1], AbsentTensor)
    with pytest.raises(ValueError, match="read-only"):
        own.detach().numpy()[0] = 0
