"""What proofs have read of a module, and whether it is another now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.state.seen import SeenState


class Settings:
    """What a module reads besides its own attributes."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.inner = {"factors": [1.0, 2.0]}


class Slots:
    """Keeps what a module reads where no ``__dict__`` shows it."""

    __slots__ = ("__scale",)

    def __init__(self, scale: float) -> None:
        self.__scale = scale

    def change(self) -> None:
        self.__scale += 1


class Inner(nn.Module):
    """Has state of several kinds."""

    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.items = [1.0]
        self.pair = (1.0, [2.0])
        self.settings = Settings()
        self.slots = [Slots(1.0)]
        self.act: nn.Module = nn.ReLU()
        self.calls = 0


class Outer(nn.Module):
    """Has one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()


READ = {
    *(("inner", name) for name in ("factor", "items", "pair", "settings", "slots", "act", "kind")),
    *(("inner", "_forward_hooks"), ("", "inner")),
}
CHANGES: dict[str, Callable[[Any], object]] = {
    "factor": lambda inner: setattr(inner, "factor", 2.0),
    "items": lambda inner: inner.items.append(2.0),
    "pair": lambda inner: inner.pair[1].append(2.0),
    "settings": lambda inner: inner.settings.inner["factors"].pop(),
    "slots": lambda inner: inner.slots[0].change(),
    "act": lambda inner: setattr(inner, "act", nn.GELU()),
    "kind": lambda inner: setattr(inner, "kind", "other"),
    "_forward_hooks": lambda inner: inner.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("is_asked_before", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name: str, is_asked_before: bool) -> None:
    module = Outer()
    seen = SeenState(module)
    seen.read(READ)
    if is_asked_before:
        assert not seen.changed()
        assert not seen.changed()
    CHANGES[name](module.inner)
    for _ in range(2):
        assert seen.changed() == [("inner", name)]


def test_what_nobody_has_read_does_not_count() -> None:
    module = Outer()
    seen = SeenState(module)
    seen.read(READ)
    for _ in range(3):
        module.inner.calls += 1
        module.inner.register_buffer("later", torch.zeros(1), persistent=False)
        assert not seen.changed()


def test_what_has_changed_before_it_is_read_counts() -> None:
    module = Outer()
    seen = SeenState(module)
    seen.read({("inner", "items")})
    assert not seen.changed()
    module.inner.factor = 2.0
    assert not seen.changed()
    seen.read({("inner", "items"), ("inner", "factor")})
    assert seen.changed() == [("inner", "factor")]


def test_an_attribute_of_a_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SeenState(Outer())
    seen.read(READ)
    assert not seen.changed()
    monkeypatch.setattr(Inner, "kind", "other")
    assert seen.changed() == [("inner", "kind")]


def test_a_copy_is_looked_at_by_itself() -> None:
    module = Outer()
    seen = SeenState(module)
    seen.read(READ)
    assert not seen.changed()
    other, its = copy.deepcopy((module, seen))
    assert not its.changed()
    other.inner.items.append(2.0)
    assert its.changed() == [("inner", "items")]
    assert not seen.changed()
