"""Which modules are split alike without a proof of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.auto.alike import are_alike


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.number = 1
        self.scales = {"up": [1.0, 2.0]}
        self.names = {"up", "down"}
        self.function = torch.relu
        self.register_buffer("mask", torch.ones(4))


def _tied(layer: Layer) -> None:
    layer.down.bias = layer.up.bias


def _number(layer: Layer) -> None:
    layer.number = 2


def _kind_of_number(layer: Layer) -> None:
    layer.number = True


def _scale(layer: Layer) -> None:
    layer.scales["up"][1] = 3.0


def _names(layer: Layer) -> None:
    layer.names.add("more")


def _function(layer: Layer) -> None:
    layer.function = torch.tanh


def _object(layer: Layer) -> None:
    layer.function = object()


def _buffer(layer: Layer) -> None:
    layer.mask[0] = 0


def _hook(layer: Layer) -> None:
    layer.up.register_forward_hook(lambda *_: None)


def _mode(layer: Layer) -> None:
    layer.up.eval()


def _frozen(layer: Layer) -> None:
    layer.up.weight.requires_grad_(False)


def _class(layer: Layer) -> None:
    layer.down = nn.Identity()


def _attribute_of_tensor(layer: Layer) -> None:
    layer.up.weight.scale = 2


CHANGES = [
    *(_tied, _number, _kind_of_number, _scale, _names, _function, _object, _buffer, _hook, _mode),
    *(_frozen, _class, _attribute_of_tensor),
]


def test_values_of_weights_make_no_difference() -> None:
    one, other = Layer(), Layer()
    assert not torch.equal(one.up.weight, other.up.weight)
    assert are_alike(one, other, lambda buffer: buffer)


@pytest.mark.parametrize("change", CHANGES)
def test_everything_else_does(change: Callable[[Layer], None]) -> None:
    one, other = Layer(), Layer()
    change(other)
    assert not are_alike(one, other, lambda buffer: buffer)
    assert not are_alike(other, one, lambda buffer: buffer)


def test_what_is_one_object_in_both_is_so_at_the_same_places() -> None:
    one, other = Layer(), Layer()
    for layer in (one, other):
        layer.down = nn.Linear(4, 8)
    one.down.weight = one.up.weight
    assert not are_alike(one, other, lambda buffer: buffer)
    other.down.weight = other.up.weight
    assert are_alike(one, other, lambda buffer: buffer)
