"""The calls of modules in a run on fakes: who is under way, what each costs, who draws."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.record.calls.lifted_hooks import asks
from smdistributed.modelparallel.torch.record.calls.refusals import NowhereError
from smdistributed.modelparallel.torch.record.costs.meter import (
    Draws,
    Meter,
    ModuleProfile,
    Profile,
)
from smdistributed.modelparallel.torch.record.run_state import RunState
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.state.python_random import python_draws
from smdistributed.modelparallel.torch.state.snapshot import Change
from smdistributed.modelparallel.torch.tensor_parallel.module import distributed_modules_on_trial
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    SliceReadError,
    slices_as_they_are,
)
from smdistributed.modelparallel.torch.trial.on_random_numbers import run_on_random_numbers

#: Stands for the step function itself where the keys of random numbers have a module's name.
STEP_FUNCTION = "step"


class Randomness(Protocol):
    """The random numbers of the step."""

    def drawing(self, name: str, call: int, draw: int) -> contextlib.AbstractContextManager[None]:
        """Seeds PyTorch's generators for one draw, and puts them back."""

    @property
    def drawn_in_python(self) -> int:
        """Calls of modules that have drawn from generators of Python or NumPy."""

    def state(self) -> list[bytes]:
        """Returns the state of the generators that a draw can change."""

    def expected_state(self, outside: list[bytes]) -> list[bytes]:
        """Returns where the generators are if nobody else has touched them."""

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Puts the generators back to where they were."""


@dataclass
class Frame:
    """A call of a module in progress, or of the step function.

    Attributes:
        module: None for the step function.
        name: in the keys of random numbers.
        call: the number of the call.
        draws: recorded draws of its own so far.
        functions: that drew.
        child_draws: draws of its children.
        child_python: a child drew from Python's generators.
    """

    module: nn.Module | None
    name: str
    call: int = 0
    draws: int = 0
    functions: set[Any] = field(default_factory=set)
    child_draws: int = 0
    child_python: bool = False

    @property
    def coming_draw(self) -> tuple[str, int, int]:
        """The key of the next draw in this call."""
        return self.name, self.call, self.draws

    def next_draw(self, function: Any) -> tuple[str, int, int]:
        """Returns the key of a draw that ``function`` has made in this call."""
        key = self.coming_draw
        self.draws += 1
        self.functions.add(function)
        return key

    def own_draws(self, drawn: int, in_python: bool) -> Draws:
        """Returns what the call drew itself, of all that was drawn while it ran."""
        # What no function mode sees, a scripted function say, counts as one draw.
        most = max(self.draws, min(1, drawn - self.child_draws))
        return Draws(most, frozenset(self.functions), in_python and not self.child_python)


class ModuleCalls:
    """Calls modules on fakes, and notes what they cost and draw.

    Args:
        scene: the models.
        state: where the run is.
        mode: of the fakes.
        meter: counts what the run does.

    Attributes:
        profile: what was measured.
    """

    def __init__(self, scene: Scene, state: RunState, mode: FakeTensorMode, meter: Meter) -> None:
        self.profile = Profile()
        self._state = state
        self._mode = mode
        self._meter = meter
        self._scene = scene
        self._stack = [Frame(None, STEP_FUNCTION)]
        self._calls: collections.Counter[str] = collections.Counter()

    def begin(self) -> None:
        """Starts a microbatch."""
        self.profile = Profile()
        self._meter.begin()
        self._stack = [Frame(None, STEP_FUNCTION)]
        self._calls.clear()

    @property
    def current(self) -> Frame:
        """The innermost call in progress."""
        return self._stack[-1]

    def where(self) -> str:
        """Names the innermost call in progress, for messages."""
        module = self.current.module
        if module is None:
            return "the step function" if self.current is self._stack[0] else self.current.name
        return self._scene.names[module] or "the model's own forward"

    def keep_whole(self, module: nn.Module, reason: str) -> None:
        """Takes note that a module cannot be split."""
        costs = self.profile.modules[module]
        costs.opaque = costs.opaque or reason

    def finish(self) -> None:
        """Takes from the end of the run what is known then alone."""
        if self._meter.tape is not None:
            self._meter.tape.close()
            self.profile.tape = self._meter.tape.tape()
        self.profile.crossing = self._meter.lifetimes.crossing(len(self.profile.modules))
        frame = self._stack[0]
        self.profile.step_draws = Draws(frame.draws, frozenset(frame.functions))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forgets the calls that are made meanwhile."""
        calls, reading = self._calls.copy(), self._meter.reading()
        yield
        self._calls = calls
        self._meter.put_back(reading)

    def count(self, module: nn.Module) -> None:
        """Counts a call that is not made: its result is known."""
        self._calls[self._scene.draw_names[module]] += 1

    def follow_hooks(self) -> None:
        """Takes note of hooks that are lifted out of modules, if any were registered since."""
        if not self._scene.lifted.is_current:
            with self.trying():
                self._scene.lifted.look()
        for model in self._scene.models:
            model.forward_hooks.follow()

    def asks(self, hook: Callable[..., Any], tensor: torch.Tensor) -> bool:
        """Whether a hook on a tensor asks for the value of its gradient."""
        with self.trying():
            return asks(hook, torch.empty_like(tensor, requires_grad=False))

    @contextlib.contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """Inside, code runs that is in none of the calls in progress: that of a hook."""
        self._stack.append(Frame(None, name))
        try:
            yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Inside, a hook is tried out: it may not exchange anything with other ranks."""
        former, self._state.runs_for_real = self._state.runs_for_real, True
        try:
            with self._state.pausing():
                yield
        finally:
            self._state.runs_for_real = former

    def follow(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a split module whose calls are known."""
        name = self._scene.draw_names[module]
        self._stack.append(Frame(module, name, self._calls[name]))
        self._calls[name] += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            self._stack.pop()

    def call(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a module; ``call`` is the real call."""
        name = self._scene.draw_names[module]
        frame = Frame(module, name, self._calls[name])
        self._calls[name] += 1
        self._stack.append(frame)
        meter = self._meter
        reading = meter.reading()
        costs = self.profile.modules.setdefault(
            module, ModuleProfile(order=len(self.profile.modules))
        )
        meter.lifetimes.called = len(self.profile.modules)
        drawn_in_python = python_draws()
        questions, real_runs = self._state.questions, self._state.real_runs
        try:
            result = self._run(call, module, args, kwargs, costs)
        finally:
            self._stack.pop()
        costs.asks |= self._state.questions != questions
        costs.repeated |= self._state.region is not None
        in_python = drawn_in_python()
        drawn = meter.random_draws - reading.random_draws
        # Numbers may have it draw, and operations that do not say so.
        drawn += meter.untold - reading.untold + self._state.real_runs - real_runs
        self.current.child_draws += drawn
        self.current.child_python |= in_python
        costs.draws = costs.draws.union(frame.own_draws(drawn, in_python))
        costs.work += meter.work_since(reading)
        costs.activation_bytes += meter.bytes - reading.bytes
        return result

    def _run(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        costs: ModuleProfile,
    ) -> Any:
        """Calls a module on fakes; where that fails, on random numbers."""
        state = self._state
        if state.is_glue or state.runs_for_real or module in self._scene.roots:
            return call(module, *args, **kwargs)
        try:
            return call(module, *args, **kwargs)
        except (SliceReadError, NowhereError):
            raise
        except Exception as error:
            # Only fakes fail so; what also fails for real is the user's own error.
            state.replaces_fakes = True
            try:
                result, changes = self.on_random_numbers(call, module, args, kwargs)
            except UnsupportedError:
                raise
            except Exception:
                raise error from None
            finally:
                state.replaces_fakes = False
            state.possible += changes
            state.real_runs += 1
            costs.opaque = f"{type(error).__name__}: {error}"
            return result

    def on_random_numbers(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, list[Change]]:
        """Calls a module on random numbers; see ``run_on_random_numbers``."""
        state = self._state
        state.runs_for_real = True
        try:
            # Peers may know what this rank records anew.
            with state.pausing(), distributed_modules_on_trial(), slices_as_they_are():
                return run_on_random_numbers(call, module, args, kwargs, self._mode)
        finally:
            state.runs_for_real = False
