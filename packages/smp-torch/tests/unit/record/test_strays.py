"""Stand-ins that code has stored are replaced where code finds them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.trace import strays
from smdistributed.modelparallel.torch.record.trace.tree import Trace


class Instance:
    stored: Any = None


class Slots:
    __slots__ = ("stored",)


def in_a_class() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    class OfAClass:
        stored: Any = None

    return lambda value: setattr(OfAClass, "stored", value), lambda: OfAClass.stored


def in_an_instance() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each = Instance()
    return lambda value: setattr(each, "stored", value), lambda: each.stored


def in_slots() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each = Slots()
    return lambda value: setattr(each, "stored", value), lambda: each.stored


def in_a_dict() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each: dict[str, Any] = {}
    return lambda value: each.update(stored=value), lambda: each["stored"]


def in_a_list() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    each: list[Any] = [None]
    return lambda value: each.__setitem__(0, value), lambda: each[0]


def in_a_closure() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    stored: Any = None

    def put(value: Any) -> None:
        nonlocal stored
        stored = value

    return put, lambda: stored


@pytest.mark.parametrize(
    "place", [in_a_class, in_an_instance, in_slots, in_a_dict, in_a_list, in_a_closure]
)
def test_what_a_microbatch_stores_is_closed_and_filled(
    place: Callable[[], tuple[Callable[[Any], None], Callable[[], Any]]],
) -> None:
    put, read = place()
    with FakeTensorMode():
        fake = torch.ones(2)
    put(fake)
    scene: Any = types.SimpleNamespace(hidden=set())
    value: Any = "v1"
    (stored,) = strays.settle([fake], Trace([]), scene, lambda tensor: None, {id(fake): value})
    assert stored.value == value
    assert stored.close()
    with pytest.raises(UnsupportedError, match="an earlier microbatch"):
        float(read())
    assert not stored.close()
    real = torch.ones(2)
    stored.fill(real)
    assert read() is real
    stored.fill(torch.zeros(2))  # of an earlier microbatch
    assert read() is real
    put(fake)
    with pytest.raises(UnsupportedError, match="stored a tensor"):
        strays.settle([fake], Trace([]), scene, lambda tensor: None, {})


@pytest.mark.parametrize(
    "place", [in_a_class, in_an_instance, in_slots, in_a_dict, in_a_list, in_a_closure]
)
def test_code_that_has_read_a_stand_in_reads_the_tensor(
    place: Callable[[], tuple[Callable[[Any], None], Callable[[], Any]]],
) -> None:
    put, read = place()
    with FakeTensorMode():
        fake = torch.ones(2)
    real = torch.ones(2)
    put(fake)
    for _ in range(100):  # Python remembers where it has found an attribute
        assert read() is fake
    scene: Any = types.SimpleNamespace(hidden=set())
    assert strays.settle([fake], Trace([]), scene, lambda tensor: real, {}) == []
    assert read() is real


def test_what_a_failed_step_has_left_to_the_collector_stores_nothing() -> None:
    """Its error refers to itself by way of frames, with what they were given."""
    with FakeTensorMode():
        fake = torch.ones(2)
    left: list[Any] = [fake]
    left.append(left)
    del left
    scene: Any = types.SimpleNamespace(hidden=set())
    value: Any = "v1"
    assert strays.settle([fake], Trace([]), scene, lambda tensor: None, {id(fake): value}) == []
