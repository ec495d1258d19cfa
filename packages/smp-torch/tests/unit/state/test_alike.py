"""Which modules are split alike without a proof of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.state.alike import are_alike
from smdistributed.modelparallel.torch.state.reads import EVERYTHING, noted


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.number = 1

    def forward(self, x: torch.Tensor, *, asks: bool = False) -> torch.Tensor:
        return super().forward(x) * (self.number if asks else 1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = Inner()
        self.number = 1
        self.scales = {"up": [1.0, 2.0]}
        self.names = {"up", "down", 1}
        self.zero = 0.0
        self.steps = nn.ModuleDict({"tanh": nn.Tanh(), "relu": nn.ReLU()})
        self.function = torch.relu
        self.register_buffer("mask", torch.ones(4))
        self.mask.kind = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self.up(x))) * self.mask

    @property
    def doubled(self) -> int:
        return 2 * self.number


EVERY = [("", EVERYTHING), ("up", EVERYTHING), ("down", EVERYTHING)]


def _tied(layer: Layer) -> None:
    layer.down.bias = layer.up.bias


def _number(layer: Layer) -> None:
    layer.number = 2


def _kind_of_number(layer: Layer) -> None:
    layer.number = True


def _number_inside(layer: Layer) -> None:
    layer.down.number = 2


def _scale(layer: Layer) -> None:
    layer.scales["up"][1] = 3.0


def _names(layer: Layer) -> None:
    layer.names.add("more")


def _kind_of_name(layer: Layer) -> None:
    layer.names.remove(1)
    layer.names.add(True)


def _sign(layer: Layer) -> None:
    layer.zero = -0.0


def _order(layer: Layer) -> None:
    layer.steps = nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh()})


def _function(layer: Layer) -> None:
    layer.function = torch.tanh


def _object(layer: Layer) -> None:
    layer.function = object()


def _missing(layer: Layer) -> None:
    del layer.function


def _buffer(layer: Layer) -> None:
    layer.mask[0] = 0


def _hook(layer: Layer) -> None:
    layer.up.register_forward_hook(lambda *_: None)


def _frozen(layer: Layer) -> None:
    layer.up.weight.requires_grad_(False)


def _class(layer: Layer) -> None:
    layer.down = nn.Identity()


def _attribute_of_tensor(layer: Layer) -> None:
    layer.up.weight.scale = 2


def _value_in_attribute_of_tensor(layer: Layer) -> None:
    layer.mask.kind = 2


#: What makes a difference where it is read.
OF_STATE = [
    *(_number, _kind_of_number, _number_inside, _scale, _names, _function, _object, _missing),
    *(_hook, _kind_of_name, _sign),
]
#: What makes a difference in any case.
OF_TENSORS = [
    *(_tied, _buffer, _frozen, _class, _attribute_of_tensor, _value_in_attribute_of_tensor),
    _order,
]


def test_values_of_weights_make_no_difference() -> None:
    one, other = Layer(), Layer()
    assert not torch.equal(one.up.weight, other.up.weight)
    assert are_alike(one, other, EVERY)


@pytest.mark.parametrize("change", OF_STATE + OF_TENSORS)
def test_everything_else_does(change: Callable[[Layer], None]) -> None:
    one, other = Layer(), Layer()
    change(other)
    assert not are_alike(one, other, EVERY)
    assert not are_alike(other, one, EVERY)
    assert are_alike(one, other, []) == (change in OF_STATE)


def test_what_is_one_object_in_both_is_so_at_the_same_places() -> None:
    one, other = Layer(), Layer()
    one.down.weight = one.up.weight
    assert not are_alike(one, other, EVERY)
    other.down.weight = other.up.weight
    assert are_alike(one, other, EVERY)


#: By what code does with a layer: what it reads of it, among other things, and what it does not.
READS: dict[str, tuple[Callable[[Layer], object], set[tuple[str, str]], set[tuple[str, str]]]] = {
    "forward": (
        lambda layer: layer(torch.ones(4)),
        {("", "function"), ("up", "_forward_hooks")},
        {("", "number"), ("down", "number"), ("", EVERYTHING), ("down", EVERYTHING)},
    ),
    "forward that asks": (
        lambda layer: layer.down(torch.ones(4), asks=True),
        {("down", "number")},
        {("", "number")},
    ),
    "property": (lambda layer: layer.doubled, {("", "number")}, set()),
    "getattr": (lambda layer: getattr(layer, "num" + "ber"), {("", "number")}, set()),
    "hasattr": (lambda layer: hasattr(layer, "number"), {("", "number")}, set()),
    "vars": (lambda layer: vars(layer)["number"], {("", EVERYTHING)}, {("down", EVERYTHING)}),
    "dict": (lambda layer: layer.down.__dict__, {("down", EVERYTHING)}, {("", EVERYTHING)}),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_noted(name: str) -> None:
    use, some, others = READS[name]
    layer, bystander = Layer(), Layer()
    with noted(layer) as read:
        use(layer)
        assert bystander.number
    assert some <= read
    assert not others & read
    for kind in (Layer, Inner, nn.Linear):
        assert "__getattribute__" not in vars(kind)
