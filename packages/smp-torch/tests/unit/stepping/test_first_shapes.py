"""Lazy modules are given shapes before the first step is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.lazy import LazyModuleMixin

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.stepping.first_shapes import give_shapes

CPU = torch.device("cpu")
Body = Callable[[nn.Module, torch.Tensor], Any]


class Own(LazyModuleMixin, nn.Module):
    """A lazy module of the user's, which becomes no other class."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.UninitializedParameter()
        self.shift = nn.Parameter(torch.zeros(1))

    def initialize_parameters(self, x: torch.Tensor) -> None:
        self.scale.materialize((x.shape[-1],))
        with torch.no_grad():
            self.scale.normal_()
            self.shift.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Other(nn.Module):
    """Counts its calls around a lazy module."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.calls, self.seen = nn.LazyLinear(4, bias=False), 0, {"last": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen["last"] = x
        return self.map(x)


class FromNumPy(Own):
    """Draws elsewhere."""

    def initialize_parameters(self, x: torch.Tensor) -> None:
        super().initialize_parameters(x)
        self.shift.data.fill_(float(np.random.rand()))


def net_of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 2))


NETS: dict[str, Callable[[], Any]] = {
    "linear": lambda: net_of(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(4)),
    "statistics": lambda: net_of(nn.BatchNorm1d(4), nn.LazyBatchNorm1d(), nn.LazyLinear(4)),
    "convolution": lambda: net_of(nn.Unflatten(1, (2, 2)), nn.LazyConv1d(2, 1), nn.Flatten()),
    "own": lambda: net_of(Own(), Own()),
    "counting": lambda: net_of(Other(), nn.Tanh(), Other()),
}


def once(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = net(x)
    return out


def with_gradients(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(net(x).sum(), x)[0]


def given(net: nn.Module, body: Body, num_microbatches: int = 1) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = FakeModel(net, mode, CPU)
    calls = [([torch.ones(6, 4)], {})] * num_microbatches
    give_shapes([fakes], lambda x: body(net, x), calls, mode, CPU)
    assert not fakes.is_current


@pytest.mark.parametrize("body", [once, with_gradients])
@pytest.mark.parametrize("kind", NETS)
def test_first_numbers_are_those_of_one_process(kind: str, body: Body) -> None:
    net, plain = NETS[kind](), NETS[kind]()
    plain[0].load_state_dict(net[0].state_dict())
    plain[-1].load_state_dict(net[-1].state_dict())
    torch.manual_seed(2)
    given(net, body)
    after = torch.rand(3)
    torch.manual_seed(2)
    body(plain, torch.ones(6, 4))
    assert torch.equal(after, torch.rand(3))
    for (name, one), (_, other) in zip(
        net.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        assert type(one) is type(other)
    fresh = nn.BatchNorm1d(4).state_dict()
    for name, each in net.named_buffers():
        assert torch.equal(each, fresh[name.rpartition(".")[2]]), name
    assert [type(each) for each in net.modules()] == [type(each) for each in plain.modules()]
    assert [each.calls for each in net.modules() if isinstance(each, Other)] == (
        [0, 0] if kind == "counting" else []
    )
    assert net(torch.ones(6, 4)).shape == (6, 2)


def test_microbatches_are_gone_through_until_all_have_a_shape() -> None:
    net = NETS["linear"]()
    met: list[int] = []

    def body(net: Any, x: torch.Tensor) -> Any:
        met.append(len(met))
        return net[len(met)](x)

    torch.manual_seed(2)
    given(net, body, 4)
    assert met == []
    torch.manual_seed(2)
    plain = NETS["linear"]()
    torch.manual_seed(2)
    for layer in (plain[1], plain[3]):
        layer(torch.ones(2, 4))
    assert torch.equal(net[3].weight, plain[3].weight)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Body]] = {
    "not called": (NETS["linear"], lambda net, x: net[0](x)),
    "asks": (NETS["linear"], lambda net, x: net(x) if net[0](x).sum() > 0 else x),
    "NumPy": (lambda: net_of(FromNumPy()), once),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_known_is_refused(case: str) -> None:
    make, body = REFUSED[case]
    with pytest.raises(UnsupportedError, match="once on an example before smp"):
        given(make(), body)
