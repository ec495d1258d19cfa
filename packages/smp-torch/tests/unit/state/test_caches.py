"""Caches of functions are looked through for fakes, whatever else they hold."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.torch.state.caches import FunctionCaches


@functools.lru_cache
def given(number: int, held: Any) -> Any:
    return [held.value]


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_only_caches_with_fakes_are_cleared() -> None:
    endless: dict[str, Any] = {}
    endless["itself"] = endless
    for value, is_fake in ((endless, False), (torch.ones(2), False), (None, True)):
        given.cache_clear()
        if is_fake:
            with FakeTensorMode():
                value = {"one": (torch.ones(2),)}
        given(0, Holder(value))
        caches = FunctionCaches()
        caches.look_for_new()
        caches.clear()
        assert given.cache_info().currsize == int(not is_fake)
    given.cache_clear()


def test_caches_are_found_that_the_collector_does_not_tell_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches = FunctionCaches()
    caches.look_for_new()
    later = functools.lru_cache(given.__wrapped__)
    monkeypatch.setattr(functools, "made_later", later, raising=False)
    with FakeTensorMode():
        later(0, Holder(torch.ones(2)))
    # As after gc.freeze(), which cannot be taken back for what this test alone has frozen.
    monkeypatch.setattr(gc, "get_referrers", lambda *_: [])
    caches.look_for_new()
    caches.clear()
    assert not later.cache_info().currsize


def test_a_cache_that_no_module_has_is_found() -> None:
    own = functools.lru_cache(given.__wrapped__)
    with FakeTensorMode():
        own(0, Holder(torch.ones(2)))
    caches = FunctionCaches()
    caches.look_for_new()
    caches.clear()
    assert not own.cache_info().currsize


@functools.cache
def settings() -> dict[str, Any]:
    return {}


def cache_of(module: str) -> Any:
    def value_of(number: int, held: Any) -> Any:
        return [held.value]

    value_of.__module__ = module
    return functools.cache(value_of)


@pytest.mark.parametrize("module", ["torch.anything", "script"])
def test_what_is_cached_since_is_found(module: str) -> None:
    of_whom = cache_of(module)
    of_whom(0, Holder(torch.ones(2)))
    caches = FunctionCaches()
    caches.look_for_new()
    with FakeTensorMode():
        of_whom(1, Holder(torch.ones(2)))
    for _ in range(2):
        caches.look_for_new()
    caches.clear()
    assert not of_whom.cache_info().currsize


def test_what_is_put_later_into_an_object_of_a_cache_is_found() -> None:
    kept = settings()
    caches = FunctionCaches()
    caches.look_for_new()
    with FakeTensorMode():
        kept["tensor"] = torch.ones(2)
    caches.look_for_new()
    caches.clear()
    assert not settings.cache_info().currsize


def test_fakes_are_found_again_by_who_has_not_looked_yet() -> None:
    of_torch = cache_of("torch.anything")
    with FakeTensorMode():
        of_torch(0, Holder(torch.ones(2)))
    FunctionCaches().look_for_new()
    caches = FunctionCaches()
    caches.look_for_new()
    caches.clear()
    assert not of_torch.cache_info().currsize
    with FakeTensorMode():
        of_torch(0, Holder(torch.ones(2)))
    caches.clear()
    assert not of_torch.cache_info().currsize
