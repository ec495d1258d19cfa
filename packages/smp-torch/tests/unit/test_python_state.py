from __future__ import annotations

import cProfile
import gc
import random
import sys
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from smdistributed.modelparallel.torch.record.python_state import StateWatch

LIMITS = {"low": 1}


class Making(OrderedDict[str, Any]):
    """Its access makes something new, as registries of classes do."""

    def __getitem__(self, key: str) -> Any:
        return [super().__getitem__(key)]


class Reader(nn.Module):
    of_class = 1

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.unread = 1.0
        self.config = SimpleNamespace(beta=2.0, unread=1.0)
        self.table = [1, 2]
        self.making = Making(a=1)

    def forward(self) -> Any:
        extra = getattr(self, "extra", 0)
        return (
            self.alpha + self.config.beta + self.table[0] + self.of_class + LIMITS["low"] + extra,
            self.making["a"],
        )


def watched(module: Reader, function: Any = None) -> StateWatch:
    watch = StateWatch(whole=())
    watch.begin(function or module.forward, [module])
    try:
        (function or module.forward)()
    finally:
        watch.end()
    return watch


@pytest.fixture
def module() -> Reader:
    return Reader()


def test_nothing_has_changed_at_first(module: Reader) -> None:
    watch = watched(module)
    assert watch.changed() is None
    module.table = [1, 2]  # another list, but equal
    module.unread = module.config.unread = 5.0
    assert watch.changed() is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda module: setattr(module, "alpha", 2.0), "alpha"),
        (lambda module: setattr(module.config, "beta", 1.0), "beta"),
        (lambda module: setattr(module, "config", SimpleNamespace(beta=2.0)), "config"),
        (lambda module: module.table.append(3), "table"),
        (lambda module: setattr(module, "of_class", 2), "of_class"),
        (lambda module: setattr(module, "extra", 2), "extra"),
        (lambda module: OrderedDict.__setitem__(module.making, "a", 2), "making"),
    ],
    ids=["attribute", "nested", "object", "list", "over the class", "new", "odd dict"],
)
def test_a_change_is_named(module: Reader, change: Any, name: str) -> None:
    watch = watched(module)
    change(module)
    assert name in str(watch.changed())


def test_a_class_attribute_and_a_global_count(
    module: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(module)
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "of_class", 5)
        assert "of_class" in str(watch.changed())
    with monkeypatch.context() as patch:
        patch.setitem(LIMITS, "low", 5)
        assert "LIMITS" in str(watch.changed())
    assert watch.changed() is None


def test_a_closure_counts(module: Reader) -> None:
    factor = 1.0

    def body() -> float:
        return factor * module.alpha

    watch = watched(module, body)
    assert watch.changed() is None
    factor = 2.0
    assert "factor" in str(watch.changed())


def test_what_the_run_itself_changes_is_seen_and_put_back(module: Reader) -> None:
    def body() -> None:
        module.alpha += 1
        module.table.append(3)
        OrderedDict.__setitem__(module.making, "b", 2)
        module.late = 1

    watch = watched(module, body)
    assert len(list(watch.changes())) >= 3
    watch.restore()
    assert watch.changed() is None
    assert (module.alpha, module.table, list(module.making)) == (1.0, [1, 2], ["a"])
    assert not hasattr(module, "late")
    assert list(module.making.values()) == [1]


def test_drawing_from_pythons_generator_is_seen(module: Reader) -> None:
    assert watched(module).random_consumed() is None
    watch = watched(module, random.random)
    assert "Python" in str(watch.random_consumed())
    state = random.getstate()
    watch.restore_random()
    assert random.getstate() != state


def test_a_profiler_of_the_user_goes_on(module: Reader) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    watched(module)
    assert sys.getprofile() is not None
    profiler.disable()
    assert sys.getprofile() is None


def test_a_class_that_was_watched_can_go() -> None:
    class Own:
        __slots__ = ("alpha",)

    watch = StateWatch(whole=())
    watch.begin(lambda each: each.alpha, [Own()])
    watch.end()
    kept = weakref.ref(Own)
    del Own, watch
    gc.collect()
    assert kept() is None


def test_a_module_under_construction_is_looked_at() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:  # called before there are any children
            super().__init__()
            self.child = nn.Linear(1, 1)

    def make() -> nn.Module:
        return Late()

    watch = StateWatch(whole=())
    watch.begin(make, [])
    try:
        make()
    finally:
        watch.end()
    assert watch.changed() is None
