"""Random numbers that do not depend on how the model is partitioned.

Every module whose own forward draws random numbers (a dropout layer, an attention with dropout)
gets a stream of its own for each call: the generators are seeded from the step, the microbatch, the
module's name and the number of the call when it is entered, and put back when it is left. So a mask
is the same whichever rank computes it and in whichever order. One seed a step comes from the user's
own generator, which advances by that one draw and is left alone otherwise.

A recomputation in the backward pass (activation checkpointing) enters the same modules again and
must see the same numbers, so it repeats the keys of the forward pass.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError


def draw_step_seed() -> int:
    """Draws the seed of a step from the user's generator."""
    return int(torch.randint(2**62, (), dtype=torch.int64))


class RandomStreams:
    """The streams of one model.

    Args:
        modules: name -> module, those whose own forward draws random numbers.
        device: where the model runs.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._device = device
        self._seed: int | None = None
        self._microbatch = 0
        self._recomputing = False
        self._calls: collections.Counter[tuple[str, int]] = collections.Counter()
        self._saved: list[list[torch.Tensor]] = []
        for name, module in modules.items():
            self._attach(name, module)

    def begin_step(self, seed: int) -> None:
        """Starts a step; streams are active until ``end_step``."""
        self._seed = seed
        self._calls.clear()
        self._saved.clear()

    def end_step(self) -> None:
        """Ends a step: modules draw from the user's generators again."""
        self._seed = None

    def enter_pass(self, microbatch: int, *, backward: bool) -> None:
        """Says which microbatch is computed next, and in which direction."""
        self._microbatch = microbatch
        self._recomputing = backward

    def _attach(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            if self._seed is not None and module.training:
                self._enter(name)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self._seed is not None and module.training:
                for generator, state in zip(self._generators(), self._saved.pop(), strict=True):
                    generator.set_state(state)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _enter(self, name: str) -> None:
        # First of all: ``leave`` is called also when the rest raises.
        generators = self._generators()
        self._saved.append([generator.get_state() for generator in generators])
        key = (name, self._microbatch)
        if self._recomputing:
            if self._calls[key] > 1:
                raise UnsupportedError(
                    f"{name} draws random numbers, is called {self._calls[key]} times in a "
                    "forward pass, and is recomputed in the backward pass; which call is repeated "
                    "cannot be told. Do not checkpoint it, or call it once."
                )
            call = 0
        else:
            call = self._calls[key]
            self._calls[key] += 1
        text = f"{self._seed}:{self._microbatch}:{name}:{call}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        for generator in generators:
            generator.manual_seed(seed)

    def _generators(self) -> list[torch.Generator]:
        if self._device.type == "cuda":
            return [torch.default_generator, torch.cuda.default_generators[self._device.index]]
        return [torch.default_generator]
