"""What a module has written to while it ran on random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from smdistributed.modelparallel.torch.tensors.contents import is_equal
from smdistributed.modelparallel.torch.tensors.writes import writes_of
from smdistributed.modelparallel.torch.trial.on_random_numbers import (
    run_on_random_numbers,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [NAN, 1.0], False),
        ([INF], [torch.finfo().max], False),
        ([INF, -INF, NAN], [INF, -INF, NAN], True),
        ([1.0], [1.0, 1.0], False),
        ([], [], True),
        ([complex(NAN, 1)], [complex(NAN, 1)], True),
        ([True, False], [True, True], False),
        ([1, 2], [1, 3], False),
    ],
)
def test_numbers_are_compared_and_what_is_none(
    one: list[float], other: list[float], equal: bool
) -> None:
    assert is_equal(torch.tensor(one), torch.tensor(other)) is equal


class Counting(nn.Module):
    """Writes to a buffer and to a tensor kept elsewhere; a parameter gets other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("other", torch.zeros(2))
        self.kept = torch.zeros(2)
        self.weight = nn.Parameter(torch.ones(2))
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in (self.count, self.kept):
            array = tensor.numpy()
            array += 1
        self.weight.data = self.weight.data * 2
        return x


def test_what_is_written_where_no_operation_shows_it_is_known_and_put_back() -> None:
    module, mode = Counting(), FakeTensorMode()
    for name, buffer in list(module.named_buffers()):
        setattr(module, name, mode.from_tensor(buffer))
    for name, parameter in list(module.named_parameters()):
        module._parameters[name] = mode.from_tensor(parameter)  # type: ignore[assignment]
    assert isinstance(module.weight, nn.Parameter)
    watched = module.count, module.other, module.kept, module.weight, module.bias
    before = list(map(writes_of, watched))
    with mode:
        x = torch.ones(2)
        result, changes = run_on_random_numbers(Counting.forward, module, (x,), {}, mode)
    assert result is x
    assert {change.path for change in changes} == {"Counting.kept"}
    changed = [writes_of(each) != state for each, state in zip(watched, before, strict=True)]
    assert changed == [True, False, True, True, False]
    assert module.kept.tolist() == [0, 0]


class Noting(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.sum()))
        return x


def test_every_rank_tries_the_same_numbers() -> None:
    module, mode = Noting(), FakeTensorMode()
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        with mode:
            run_on_random_numbers(Noting.forward, module, (torch.ones(3),), {}, mode)
        assert torch.equal(torch.get_rng_state(), state)
    assert len(module.seen) == 2
    assert len(set(module.seen)) == 1


class Keeping(nn.Linear):
    """Decides by its input, and keeps what it computes in attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x[x.sum(-1) > 0])
        self.mean, self.pair, self.given = out.mean(), (out, x.detach()), x
        self.again = self.weight
        return out


def test_what_a_module_keeps_is_kept_as_fakes() -> None:
    mode = FakeTensorMode()
    with mode:
        module, x = Keeping(2, 2), torch.ones(3, 2)
    out, _ = run_on_random_numbers(nn.Module.__call__, module, (x,), {}, mode)
    assert type(module.mean) is FakeTensor
    assert module.mean.requires_grad
    assert module.pair[0] is out
    assert not module.pair[1].requires_grad
    assert module.given is x
    assert type(module.again) is not FakeTensor  # which is put back with the parameters
