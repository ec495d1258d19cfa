"""Checkpointed calls find objects with state as they were, also in a pipeline; no processes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn
from torch.utils import checkpoint as native

from smdistributed.modelparallel.torch.activations import checkpointing
from smdistributed.modelparallel.torch.compat.private.backward import is_accumulation_kept
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.state.carried import CarriedObjects

WIDTH, LENGTH = 4, 3


class Cache:
    """Keys of all layers, which each of them adds to."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.number = 0

    def update(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        known = self.keys.get(layer)
        self.keys[layer] = keys if known is None else torch.cat([known, keys])
        self.number += 1
        return self.keys[layer]


class Layer(nn.Linear):
    """Has a bias of one value a key, so that it has to be given as many as it has examples."""

    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.number = number
        self.of_keys = nn.Parameter(torch.randn(LENGTH, 1))

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
        keys = cache.update(self.number, super().forward(x).tanh()) + self.of_keys
        return x + keys.square() * cache.number


class Layers(nn.Module):
    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(number) for number in range(4))
        self.checkpoint = checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        self.cache = weakref.ref(cache)
        for layer in self.layers:
            x = self.checkpoint(layer, x, cache=cache) if self.checkpoint else layer(x, cache)
        assert cache.number == len(self.layers)
        return x


def gradients(module: nn.Module, result: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(result.square().sum(), list(module.parameters())))


def wanted(x: torch.Tensor) -> list[torch.Tensor]:
    plain = Layers(None)
    return gradients(plain, plain(x))


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(LENGTH, WIDTH, requires_grad=True)


def test_a_call_that_comes_again_adds_to_the_cache_as_it_was(x: torch.Tensor) -> None:
    module = Layers(checkpointing.checkpoint)
    torch.testing.assert_close(gradients(module, module(x)), wanted(x))


def test_caches_and_graphs_go_when_the_result_does(x: torch.Tensor) -> None:
    module = Layers(checkpointing.checkpoint)
    gc.collect()
    gc.disable()
    try:
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        del loss
        assert module.cache() is None
        assert not any(map(is_accumulation_kept, module.parameters()))
    finally:
        gc.enable()


@pytest.mark.parametrize("places", [(0, 0, 0, 0), (0, 1, 1, 0)])
def test_so_it_does_in_a_pipeline(x: torch.Tensor, places: tuple[int, ...]) -> None:
    module = Layers(checkpointing.checkpoint)
    plan = Recorded(module, {f"layers.{n}": p for n, p in enumerate(places)}).plan(module, x)
    values: dict[int, torch.Tensor] = {}
    carried = [CarriedObjects(), CarriedObjects()]
    for segment in plan.segments:
        program = Program(plan, segment, CPU, StepRandom(CPU))
        inputs = [x, *(each.tensor for each in plan.graph.constants)]
        given = [values[value.index] for value in segment.inputs]
        results = program.run(inputs, carried[segment.rank], *given)
        values |= {v.index: each for v, each in zip(segment.outputs, results, strict=True)}
    (returned,) = plan.graph.returned
    torch.testing.assert_close(gradients(module, values[returned.index]), wanted(x))


def test_what_cannot_be_copied_is_given_as_it_is(x: torch.Tensor) -> None:
    class Lock(nn.Linear):
        def forward(self, x: torch.Tensor, lock: Any) -> torch.Tensor:  # type: ignore[override]
            with lock:
                return super().forward(x)

    module = Lock(WIDTH, WIDTH)
    found = checkpointing.checkpoint(module, x, threading.Lock())
    native_one = native.checkpoint(module, x, threading.Lock(), use_reentrant=False)
    torch.testing.assert_close(gradients(module, found), gradients(module, native_one))
