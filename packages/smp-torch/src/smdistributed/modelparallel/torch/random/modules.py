"""Which modules of a model draw random numbers, and the keys of their draws.

A module that draws once in a call, or that is never split, is seeded when it is entered; one that
draws several times and has children is watched draw by draw, since another partition may execute
its draws on several ranks. What a module draws is known from a recording, or learned in its first
call: that call is keyed in every way, and what it did draw is noted. Compiled code must not be
interrupted: it is seeded around each of its calls, for all that is in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.compat.private.compiled import (
    around_compiled,
    hooked,
)
from smdistributed.modelparallel.torch.compat.private.modes import without_function_modes
from smdistributed.modelparallel.torch.random.keys import DrawByDraw, StepRandom
from smdistributed.modelparallel.torch.record.costs.meter import Draws
from smdistributed.modelparallel.torch.state.python_random import python_draws


class _FirstCall:
    """Seeds all that one call of a module may draw, and finds out what it does draw.

    Args:
        random: of the step.
        name: of the module.
        call: the number of its call.
        by_draw: whether several draws have keys of their own.
    """

    def __init__(self, random: StepRandom, name: str, call: int, *, by_draw: bool) -> None:
        self._random = random
        self._name = name
        self._call = call
        self.mode = DrawByDraw(random, name, call, None) if by_draw else None
        self._stack = contextlib.ExitStack()
        self._draws = Draws()

    def __enter__(self) -> _FirstCall:
        self._stack.enter_context(self._random.drawing(self._name, self._call, 0))
        self._stack.enter_context(self._random.drawing_in_python(self._name, self._call))
        drawn_in_python = python_draws()
        state = self._random.state()
        if self.mode is not None:
            self._stack.enter_context(self.mode)

        def note() -> None:
            # What no function mode sees, a scripted function say, counts as one draw.
            unseen = int(state != self._random.state())
            self._draws = Draws(
                max(unseen, self.mode.draws if self.mode else 0),
                frozenset(self.mode.drew if self.mode else ()),
                drawn_in_python(),
            )

        self._stack.callback(note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def found(self) -> Draws:
        """Returns what the call drew; after its end."""
        return self._draws


class RandomStreams:
    """Keys the draws of one model's modules while they run as they are.

    Args:
        random: of the step in progress.
        compiled: the modules that run as compiled code.
    """

    def __init__(self, random: StepRandom, compiled: Container[nn.Module] = ()) -> None:
        self._random = random
        self._compiled = compiled
        self._known: dict[nn.Module, Draws] = {}
        self._handles: dict[nn.Module, list[Any]] = {}

    def learn(self, modules: Mapping[str, nn.Module]) -> None:
        """Finds out what modules draw, each in its next call in a step.

        Args:
            modules: by the name of their keys.
        """
        for name, module in modules.items():
            if module in self._compiled:
                self.add({name: (module, self._known.pop(module, Draws()))})
            else:
                self._hook(module, *self._learning(name, module))

    def add(self, modules: Mapping[str, tuple[nn.Module, Draws]]) -> None:
        """Takes modules whose draws were seen, by the name of their keys."""
        for name, (module, draws) in modules.items():
            known = self._known.get(module)
            both = draws if known is None else known.union(draws)
            if module in self._compiled:
                both = both.union(Draws(most=1))  # what it draws is not seen
            if both == known:
                continue
            self._known[module] = both
            if both.in_python:
                self._random.note_draws_in_python(module)
            if both:
                self._hook(module, *self._keying(name, module, both))
            else:
                self._hook(module)

    def keep(self, modules: Mapping[str, nn.Module]) -> None:
        """Takes what belongs to the model now; others draw from the user's generators for good.

        Args:
            modules: by the name of their keys.
        """
        for module in list(self._handles):
            self._hook(module)
        present = set(modules.values())
        self._known = {each: draws for each, draws in self._known.items() if each in present}
        self.learn(modules)

    def _hook(self, module: nn.Module, *hooks: Callable[..., None]) -> None:
        """Hooks the start and the end of a module's calls, in place of what was there before."""
        for handle in self._handles.pop(module, ()):
            handle.remove()
        if not hooks:
            return
        around = around_compiled if module in self._compiled else hooked
        self._handles[module] = around(module, *hooks)

    def _learning(self, name: str, module: nn.Module) -> tuple[Callable[..., None], ...]:
        random = self._random
        by_draw = next(module.children(), None) is not None
        # A rehearsal draws nothing for real from PyTorch's generators, but it does from Python's.
        enter_rehearsal, leave_rehearsal = self._keying(
            name, module, self._known.get(module, Draws()).union(Draws(in_python=True))
        )
        rehearsals: list[Callable[[], bool]] = []
        entered: list[_FirstCall | None] = []
        found = Draws()

        def enter(module: nn.Module, args: Any) -> None:
            if random.is_apart:
                return
            if not random.is_real:
                enter_rehearsal(module, args)
                rehearsals.append(python_draws())
                return
            # First of all: ``leave`` is called also when the rest raises.
            entered.append(None)
            call = _FirstCall(random, name, random.number_of_call(name), by_draw=by_draw)
            random.entered.append(call.mode)
            entered[-1] = call.__enter__()

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            nonlocal found
            if random.is_apart:
                return
            if not entered:
                drew = bool(rehearsals) and rehearsals.pop()()
                leave_rehearsal(module, args, result)
                if drew and not rehearsals:
                    self.add({name: (module, Draws(in_python=True))})
                return
            call = entered.pop()
            if call is None:
                return
            call.__exit__()
            random.entered.pop()
            found = found.union(call.found())
            if not entered:  # else the module called itself, and is still under way
                self.add({name: (module, found.union(self._known.pop(module, found)))})

        return enter, leave

    def _keying(
        self, name: str, module: nn.Module, draws: Draws
    ) -> tuple[Callable[..., None], ...]:
        random = self._random
        is_compiled = module in self._compiled
        by_draw = draws.most > 1 and not is_compiled and next(module.children(), None) is not None
        saved: list[contextlib.ExitStack] = []

        def enter(module: nn.Module, args: Any) -> None:
            if random.is_apart:
                return
            stack = contextlib.ExitStack()
            # First of all: ``leave`` is called also when the rest raises.
            saved.append(stack)
            if not random.is_active:
                return
            call = random.number_of_call(name)
            if is_compiled:
                stack.enter_context(without_function_modes(DrawByDraw))
            entered: object = stack
            if by_draw:
                entered = stack.enter_context(DrawByDraw(random, name, call, draws.functions))
            elif draws.most:
                stack.enter_context(random.drawing(name, call, 0))
            if draws.in_python:
                stack.enter_context(random.drawing_in_python(name, call))
            random.entered.append(entered)
            stack.callback(random.entered.pop)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if not random.is_apart:
                saved.pop().close()

        return enter, leave
