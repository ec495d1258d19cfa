"""Random numbers that do not depend on how the model is partitioned.

Every draw of a step has a key: the module in whose own forward it happens, the number of that
module's call, and the number of the draw in the call. The generators are seeded from the step, the
microbatch and the key, and put back afterwards, so a mask is the same whichever rank computes it
and in whichever order. One seed a step comes from the user's own generator, see ``step_seed``,
which is left alone otherwise.

A recomputation in the backward pass (activation checkpointing) enters the same modules again and
must see the same numbers, so it repeats the keys of the forward pass: a function that torch's
checkpointing calls again counts calls and draws from where it counted from at first.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    past_all_modes,
    past_function_modes,
    past_transforms,
)
from smdistributed.modelparallel.torch.state.python_random import python_draws

#: Of a draw: the module's name, the number of its call, the number of the draw in that.
_Key = tuple[str, int, int]
#: How many calls there have been, and draws in the innermost if these are counted.
Place = tuple[collections.Counter[tuple[str, int]], int | None]


class SeesDraws(Protocol):
    """Who stands between Python and torch in a pass."""

    def drawing(
        self,
        key: _Key,
        lane: int,
        seeded: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> contextlib.AbstractContextManager[None]:
        """Stands around a draw, for which ``seeded`` seeds the generators."""

    def has_drawn(self, has: Callable[[], bool]) -> bool:
        """Tells whether the innermost draw has drawn numbers, which ``has`` tells, too."""


class CapturedDraws:
    """The draws of a pass that is captured as a CUDA graph: each is of a generator of its own.

    A graph reads the seeds of its generators when it is launched.

    Args:
        random: of the step.
        count: how many draws there are at most.

    Attributes:
        generators: one a draw, in order.
    """

    def __init__(self, random: StepRandom, count: int) -> None:
        self._random = random
        self.generators = [torch.Generator(random.device) for _ in range(count)]
        self._keys: list[tuple[_Key, int]] = []
        self._is_seeded = False

    @property
    def may_draw(self) -> bool:
        """Whether the pass draws numbers; also if it might, as it has not been launched yet.

        A compiled function counts as a draw, whatever it computes. A launch moves a generator on
        by what is drawn.
        """
        if not self.generators:
            return False
        is_known = self._is_seeded and self._random.device.type == "cuda"
        return not is_known or any(generator.get_offset() for generator in self.generators)

    def left(self) -> list[torch.Generator]:
        """Returns those that the pass in progress, which is captured, has not drawn from."""
        return self.generators[len(self._keys) :]

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, the pass is captured."""
        self._random.captured = self
        try:
            yield
        finally:
            self._random.captured = None

    @contextlib.contextmanager
    def drawing(self, key: _Key, lane: int) -> Iterator[None]:
        """Inside, one draw is captured.

        Raises:
            UnsupportedError: it is on the host, or there are more than were expected.
        """
        if len(self._keys) == len(self.generators):
            raise UnsupportedError(f"{key[0]} draws random numbers, and did not before")
        own = self.generators[len(self._keys)]
        self._keys.append((key, lane))
        (device_generator,) = self._random.generators_of_device
        with self._random.kept_on_host(key[0]):
            former = device_generator.graphsafe_get_state()
            device_generator.graphsafe_set_state(own)
            self._random.under_way.append(key)
            try:
                yield
            finally:
                device_generator.graphsafe_set_state(former)
                self._random.under_way.pop()

    def seed(self) -> None:
        """Seeds the draws for the step and the microbatch in progress; a launch follows."""
        self._is_seeded = True
        self._random.launched.append(self)
        for generator, (key, lane) in zip(self.generators, self._keys, strict=False):
            generator.manual_seed(self._random.seed_of(key, lane))


class _Seeded:
    """A context in which generators are seeded; a plain class, since each draw enters one."""

    __slots__ = ("_generators", "_key", "_random", "_seed", "_states")

    def __init__(
        self, random: StepRandom, generators: list[torch.Generator], seed: int, key: _Key
    ) -> None:
        self._random = random
        self._generators = generators
        self._seed = seed
        self._key = key

    def __enter__(self) -> None:
        # No mode sees what generators do themselves.
        self._random.under_way.append(self._key)
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *exception: object) -> None:
        if self._random.is_real and not self._random.has_moved:
            moved = self._random.state()
            for generator in self._generators:
                generator.manual_seed(self._seed)
            self._random.has_moved = moved != self._random.state()
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        self._random.under_way.pop()


class StepRandom:
    """The random numbers of the step in progress, for all models of a process.

    Tensor-parallel ranks with examples of their own draw from one seed, as *lanes*: rank ``r`` of
    ``n`` takes the numbers that a process alone would take for microbatch ``n m + r``.

    Args:
        device: where the models run.
        num_lanes: how many ranks draw from one seed.
        lane: which of them this is.

    Attributes:
        draws: how many there were in each pass of the step.
        captured: takes the draws of the pass in progress, if it is captured.
        launched: the draws of captured passes that the step has launched.
        has_moved: a generator has moved in a draw of the step in progress, one of Python's also in
            a rehearsal, whose own code is not computed again.
        drawn_in_python: calls of modules that have drawn from generators of Python or NumPy.
        is_apart: whether what runs is tried, and none of the step.
    """

    def __init__(self, device: torch.device, num_lanes: int = 1, lane: int = 0) -> None:
        self._num_lanes = num_lanes
        self._lane = lane
        #: The keys of the draws in progress, the innermost last.
        self.under_way: list[_Key] = []
        self._own_states: list[list[bytes]] = []
        self.device = device
        self.draws: list[int] = []
        self.captured: CapturedDraws | None = None
        self.launched: list[CapturedDraws] = []
        self.has_moved = False
        self.drawn_in_python = 0
        self._between: SeesDraws | None = None
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._seed: int | None = None
        self._is_rehearsal = False
        self._state_at_begin: list[bytes] = []
        self._microbatch = 0
        self._recomputing = False
        self.is_apart = False
        self._calls: collections.Counter[tuple[str, int]] = collections.Counter()
        self._repeated_calls: collections.Counter[tuple[str, int]] | None = None
        #: How often modules had been called before a call that comes once more.
        self._remembered: dict[tuple[int, int], collections.Counter[tuple[str, int]]] = {}
        self._in_python: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        #: The calls of drawing modules in progress, the innermost last.
        self.entered: list[object] = []

    def note_draws_in_python(self, module: nn.Module) -> None:
        """Takes note that the own forward of a module draws from Python's or NumPy's generator."""
        self._in_python.add(module)

    def draws_in_python(self, module: nn.Module) -> bool:
        """Whether the own forward of a module is known to draw from Python's generators."""
        return module in self._in_python

    def owns_hook(self, hook: Callable[..., Any]) -> bool:
        """Whether a hook of a module does nothing but key its random numbers."""
        return hook.__module__.rpartition(".")[0] == __package__

    @property
    def is_active(self) -> bool:
        """Whether a step is in progress."""
        return self._seed is not None

    @property
    def is_real(self) -> bool:
        """Whether a step is in progress that computes, not one that is recorded."""
        return self._seed is not None and not self._is_rehearsal

    def begin(self, seed: int, *, rehearsal: bool = False) -> None:
        """Starts a step, or goes through it again; active until ``end``.

        Args:
            seed: of the step.
            rehearsal: it is recorded on fakes.
        """
        self._seed = seed
        self._is_rehearsal = rehearsal
        self.draws = []
        self._calls.clear()
        self._remembered.clear()
        self.entered.clear()
        self.under_way.clear()
        self._state_at_begin = [] if rehearsal else self.state()

    def end(self) -> bool:
        """Ends a step: modules draw from the user's generators again.

        Returns:
            whether everything that was drawn had a key.
        """
        self._seed = None
        self.launched.clear()
        self.has_moved = False
        return not self._state_at_begin or self._state_at_begin == self.state()

    @property
    def has_drawn(self) -> bool:
        """Whether the step in progress has drawn numbers that have keys, on this rank."""
        return self.has_moved or any(each.may_draw for each in self.launched)

    @contextlib.contextmanager
    def computing_ahead(
        self, calls: collections.Counter[tuple[str, int]], microbatch: int
    ) -> Iterator[None]:
        """In the middle of a rehearsal, draws what the step will draw.

        Args:
            calls: that have drawn so far; goes on.
            microbatch: which one is computed.
        """
        at, has_moved = self._microbatch, self.has_moved
        former = self._calls, self.draws, self.entered, self.under_way, self._own_states
        self._calls, self.draws, self.entered, self.under_way = calls, [], [], []
        self._microbatch = microbatch
        self._own_states, self._is_rehearsal = [], False
        try:
            with self.kept():
                yield
        finally:
            self._calls, self.draws, self.entered, self.under_way, self._own_states = former
            self._microbatch, self._is_rehearsal, self.has_moved = at, True, has_moved

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, a microbatch is tried: nothing is counted or keyed, and draws are put back."""
        former, self.entered = self.entered, [None]  # who draws around it does not key its draws
        self.is_apart = True
        try:
            with self.kept():
                yield
        finally:
            self.entered, self.is_apart = former, False

    def enter_pass(self, microbatch: int, *, backward: bool) -> None:
        """Says which microbatch is computed next, and in which direction."""
        self._microbatch = microbatch
        self._recomputing = backward
        self.draws.append(0)

    def number_of_call(self, name: str) -> int:
        """Counts a call of a module; returns its number in this microbatch.

        Raises:
            UnsupportedError: it is a recomputation of one of several calls, and not by torch's
                checkpointing.
        """
        key = (name, self._microbatch)
        if self._repeated_calls is not None:
            self._repeated_calls[key] += 1
            return self._repeated_calls[key] - 1
        if not self._recomputing:
            self._calls[key] += 1
            return self._calls[key] - 1
        if self._calls[key] > 1:
            raise UnsupportedError(
                f"{name} draws random numbers, is called {self._calls[key]} times in a "
                "forward pass, and is recomputed in the backward pass; which call is repeated "
                "cannot be told. Use torch.utils.checkpoint.checkpoint, or call it once."
            )
        return 0

    def repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what a recomputation calls to draw what ``function`` would draw now."""
        if not self.is_active:
            return function
        before = self._calls if self._repeated_calls is None else self._repeated_calls
        calls = before.copy()
        entered = self.entered[-1] if self.entered else None
        draws = entered.copy() if isinstance(entered, DrawByDraw) else None
        lane = self._lane

        def repeat(*args: Any, **kwargs: Any) -> Any:
            former, self._repeated_calls = self._repeated_calls, calls.copy()
            former_lane, self._lane = self._lane, lane
            mode = None if draws is None else draws.copy()
            self.entered.append(mode)
            try:
                with mode or contextlib.nullcontext():
                    return function(*args, **kwargs)
            finally:
                self.entered.pop()
                self._repeated_calls, self._lane = former, former_lane

        return repeat

    def remember(self, call: int) -> None:
        """Takes note that the next call of a module comes once more in its microbatch.

        Args:
            call: a number for it.
        """
        self._remembered[self._microbatch, call] = self._counted().copy()

    @contextlib.contextmanager
    def once_more(self, call: int) -> Iterator[None]:
        """Inside, a call draws what it drew when it was remembered.

        Args:
            call: its number.
        """
        former, self._repeated_calls = (
            self._repeated_calls,
            self._remembered[self._microbatch, call].copy(),
        )
        try:
            yield
        finally:
            self._repeated_calls = former

    def drawing(self, name: str, call: int, draw: int) -> contextlib.AbstractContextManager[None]:
        """Seeds the generators for one draw, and puts them back."""
        return self._seeded((name, call, draw), self._lane)

    def as_lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        """Seeds the generators as another lane has them in the draw in progress.

        Args:
            lane: which. Where no draw is in progress nothing is done: who draws is not known yet.
        """
        if not self.under_way:
            return contextlib.nullcontext()
        return self._seeded(self.under_way[-1], lane)

    def place(self) -> Place:
        """Returns how many calls and draws there have been."""
        entered = self.entered[-1] if self.entered else None
        draws = entered.draws if isinstance(entered, DrawByDraw) else None
        return self._counted().copy(), draws

    @contextlib.contextmanager
    def computing_for(self, lane: int, place: Place) -> Iterator[None]:
        """Draws what another lane draws, in the call in progress and those that it makes.

        Args:
            lane: which.
            place: where to count calls and draws from: every lane makes the same ones.
        """
        counted, entered = self._counted(), self.entered[-1] if self.entered else None
        counted.clear()
        counted.update(place[0])
        by_draw = isinstance(entered, DrawByDraw)
        if isinstance(entered, DrawByDraw) and place[1] is not None:
            entered.draws = place[1]
        former, self._lane = self._lane, lane
        try:
            with contextlib.nullcontext() if by_draw else self.as_lane(lane):
                yield
        finally:
            self._lane = former

    def _counted(self) -> collections.Counter[tuple[str, int]]:
        return self._calls if self._repeated_calls is None else self._repeated_calls

    def _seeded(self, key: _Key, lane: int) -> contextlib.AbstractContextManager[None]:
        if self._between is not None:
            return self._seen(key, lane, self._between)
        return self.seeded(key, lane)

    @contextlib.contextmanager
    def _seen(self, key: _Key, lane: int, between: SeesDraws) -> Iterator[None]:
        # Nobody may have seeded generators: other lanes go by the draw that is under way.
        self.under_way.append(key)
        try:
            with between.drawing(key, lane, functools.partial(self.seeded, key, lane)):
                yield
        finally:
            self.under_way.pop()

    @contextlib.contextmanager
    def seen_by(self, between: SeesDraws) -> Iterator[None]:
        """Inside, draws go by who stands between Python and torch."""
        former, self._between = self._between, between
        try:
            yield
        finally:
            self._between = former

    def innermost_has_drawn(self, before: list[bytes]) -> bool:
        """Whether the innermost draw has drawn numbers, since the generators were at ``before``."""

        def has() -> bool:
            return before != self.state()

        return has() if self._between is None else self._between.has_drawn(has)

    def seeded(self, key: _Key, lane: int) -> contextlib.AbstractContextManager[None]:
        """Inside, numbers have a key, whoever stands between.

        Args:
            key: of the numbers.
            lane: whose they are.
        """
        if self.captured is not None:
            return self.captured.drawing(key, lane)
        seeded = _Seeded(self, self._generators, self.seed_of(key, lane), key)
        if not self.is_real:
            return self._noted(seeded)
        if self.draws:
            self.draws[-1] += 1
        return seeded

    @contextlib.contextmanager
    def _noted(self, seeded: _Seeded) -> Iterator[None]:
        with seeded:
            self._own_states.append(self.state())
            try:
                yield
            finally:
                self._own_states.pop()

    def expected_state(self, outside: list[bytes]) -> list[bytes]:
        """Returns where the generators are in a rehearsal if nobody else has touched them.

        Args:
            outside: where they are outside of all draws.
        """
        return self._own_states[-1] if self._own_states else outside

    @contextlib.contextmanager
    def drawing_in_python(self, name: str, call: int) -> Iterator[None]:
        """The same for the generators of Python and NumPy.

        Raises:
            UnsupportedError: the pass is captured.
        """
        if self.captured is not None:
            raise UnsupportedError(f"{name} draws from a generator of Python or NumPy")
        # One number decides for the examples of all lanes, as which layers run.
        seed = self.seed_of((name, call, 0), 0)
        former = random.getstate()
        numpy = sys.modules.get("numpy")
        former_numpy = numpy.random.get_state() if numpy is not None else None
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        drawn = python_draws()
        try:
            yield
        finally:
            if drawn():
                self.has_moved = True
                self.drawn_in_python += 1
            random.setstate(former)
            if numpy is not None:
                numpy.random.set_state(former_numpy)

    def state(self) -> list[bytes]:
        """Returns the state of the generators that a draw can change."""
        # Recordings ask at each call: the bytes where they are, which no operation of torch reads.
        with past_function_modes():
            states = [each.get_state() for each in self._generators]
            return [ctypes.string_at(each.data_ptr(), each.nbytes) for each in states]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Puts the generators back to where they are now: what runs inside draws nothing."""
        before = self.state()
        try:
            yield
        finally:
            if self.state() != before:
                with past_all_modes(), past_transforms():
                    for generator, state in zip(self._generators, before, strict=True):
                        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    @property
    def generators_of_device(self) -> list[torch.Generator]:
        """The generators that are not on the host."""
        return self._generators[1:]

    @contextlib.contextmanager
    def kept_on_host(self, name: str) -> Iterator[None]:
        """Inside, nothing is drawn on the host: what a captured pass decides by it would stay.

        Raises:
            UnsupportedError: something is.
        """
        before = torch.default_generator.get_state()
        try:
            yield
        finally:
            is_moved = not torch.equal(before, torch.default_generator.get_state())
            torch.default_generator.set_state(before)
        if is_moved:
            raise UnsupportedError(f"{name} draws random numbers on the host")

    def seed_of(self, key: _Key, lane: int) -> int:
        """Returns the seed of a draw in the step and the microbatch in progress."""
        name, call, draw = key
        microbatch = self._microbatch * self._num_lanes + lane
        text = f"{self._seed}:{microbatch}:{name}:{call}:{draw}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def repeatable_checkpoints(random: StepRandom) -> contextlib.AbstractContextManager[None]:
    """Lets torch's activation checkpointing repeat the random numbers of the forward pass."""

    def replace(around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        return (
            lambda function, *args, **kwargs: around(random.repeatable(function), *args, **kwargs),
            lambda function, *args: reentrant(once_plain(function), *args),
        )

    def once_plain(function: Callable[..., Any]) -> Callable[..., Any]:
        # This kind calls what it is given also in the forward pass.
        calls = itertools.chain([function], itertools.repeat(random.repeatable(function)))
        return lambda *args: next(calls)(*args)

    return checkpointing_replaced(replace)


class DrawByDraw(TorchFunctionMode):
    """Seeds each draw of one call of a module, those of its children left out.

    Args:
        random: of the step.
        name: of the module.
        call: the number of its call.
        functions: the torch functions that draw; None if that is not known.

    Attributes:
        draws: how often was drawn.
        drew: the functions that did.
    """

    def __init__(
        self, random: StepRandom, name: str, call: int, functions: frozenset[Any] | None
    ) -> None:
        super().__init__()
        self._random = random
        self._name = name
        self._call = call
        self._functions = functions
        self._before: list[bytes] = []
        self.draws = 0
        self.drew: set[Any] = set()

    def __enter__(self) -> DrawByDraw:
        self._before = self._random.state()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def copy(self) -> DrawByDraw:
        """Returns one that goes on counting from where this one is."""
        other = DrawByDraw(self._random, self._name, self._call, self._functions)
        other.draws = self.draws
        return other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self._functions
        if (known is not None and func not in known) or self._random.entered[-1] is not self:
            return func(*args, **kwargs)
        if self._before != self._random.state():
            return func(*args, **kwargs)  # code has seeded the generators, and means those numbers
        with self._random.drawing(self._name, self._call, self.draws):
            before = self._random.state()
            result = func(*args, **kwargs)
            if self._random.innermost_has_drawn(before):
                self.draws += 1
                self.drew.add(func)
        return result
