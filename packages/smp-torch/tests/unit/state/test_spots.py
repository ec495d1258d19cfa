"""Tensors are found where code can reach them, and others are shown there for a while."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.state.holders import MISSING
from smdistributed.modelparallel.torch.state.snapshot import Snapshot

BOX = types.SimpleNamespace(kept={})


class Slots:
    __slots__ = ("kept",)


class Net(nn.Module):
    shared: Any = None


def in_an_attribute(net: Net, tensor: Any) -> Callable[[], Any]:
    net.kept = tensor
    return lambda: net.kept


def in_an_object(net: Net, tensor: Any) -> Callable[[], Any]:
    net.box = types.SimpleNamespace(inner=types.SimpleNamespace(kept=tensor))
    return lambda: net.box.inner.kept


def in_slots(net: Net, tensor: Any) -> Callable[[], Any]:
    net.box = Slots()
    net.box.kept = tensor
    return lambda: net.box.kept


def in_a_class(net: Net, tensor: Any) -> Callable[[], Any]:
    Net.shared = tensor
    return lambda: Net.shared


def in_a_dict_of_a_global(net: Net, tensor: Any) -> Callable[[], Any]:
    BOX.kept["a"] = tensor
    return lambda: BOX.kept["a"]


def in_a_tuple(net: Net, tensor: Any) -> Callable[[], Any]:
    net.kept = {"a": (1, tensor)}
    return lambda: net.kept["a"][1]


def in_a_closure(net: Net, tensor: Any) -> Callable[[], Any]:
    kept = tensor
    return lambda: kept


@pytest.mark.parametrize(
    "keep",
    [
        *(in_an_attribute, in_an_object, in_slots, in_a_class, in_a_dict_of_a_global, in_a_tuple),
        in_a_closure,
    ],
)
def test_another_tensor_is_shown_where_one_was_found(
    keep: Callable[[Net, Any], Callable[[], Any]],
) -> None:
    net, one, other = Net(), torch.ones(1), torch.zeros(1)
    read = keep(net, one)
    found = Snapshot([net], [read]).spots_of({id(one)})
    assert found is not None
    ((spot, content, _),) = found
    assert spot.read() == content
    with spot.showing((1, other) if isinstance(content, tuple) else other):
        assert read() is other
    assert read() is one


def test_a_list_is_found_as_it_was() -> None:
    net, one = Net(), torch.ones(1)
    net.items = [one, 2]
    snapshot = Snapshot([net])
    net.items.clear()
    ((spot, content, lists),) = snapshot.spots_of({id(one)}) or ()
    assert content == [one, 2]
    assert lists == {id(net.items)}
    with spot.showing(content):
        assert net.items == [one, 2]
    assert net.items == []


def test_a_place_may_be_made_anew_but_must_be_there() -> None:
    net, one, other = Net(), torch.ones(1), torch.zeros(1)
    net.kept = {"a": one}
    ((spot, _, _),) = Snapshot([net]).spots_of({id(one)}) or ()
    net.kept = {}
    assert spot.read() is MISSING
    with spot.showing(other):
        assert net.kept == {"a": other}
    assert net.kept == {}
    net.kept = None
    with pytest.raises(LookupError), spot.showing(other):
        pass


def test_a_tensor_that_is_also_where_nothing_can_be_put_is_not_found() -> None:
    net, one = Net(), torch.ones(1)
    net.kept = one
    net.variable = contextvars.ContextVar("variable")
    net.variable.set(one)
    assert Snapshot([net]).spots_of({id(one)}) is None


def test_names_are_the_same_where_keys_are_identities() -> None:
    names = set()
    for _ in range(2):
        net, tensor = Net(), torch.zeros(1)
        vars(net)["kept"] = {id(net): torch.ones(1), object(): tensor, "last": torch.ones(1)}
        [found] = Snapshot([net]).spots_of({id(tensor)}) or []
        assert found.spot.read() is tensor
        names.add(found.spot.name)
    assert names == {"Net.kept.#1"}
