"""Python that runs again, answered from its tape."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.between import standing_between
from smdistributed.modelparallel.torch.compat.calling_line import calling_line
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
    stops_early,
)
from smdistributed.modelparallel.torch.compat.private.compiled import call_as_written
from smdistributed.modelparallel.torch.compat.private.modes import (
    function_modes_left,
    is_watched_below,
)
from smdistributed.modelparallel.torch.tape.promised import Promised
from smdistributed.modelparallel.torch.tape.promises import keep
from smdistributed.modelparallel.torch.tape.running import Keyed, Running, pairs, seeds
from smdistributed.modelparallel.torch.tape.tape import (
    Call,
    CastsForgotten,
    DrawBegins,
    DrawEnds,
    Earlier,
    Event,
    Made,
    OnHost,
    Own,
    RegionBegins,
    RegionEnds,
    filled,
    has_state,
)
from smdistributed.modelparallel.torch.tensors.nested import (
    map_tensors,
    same,
    tensors_in,
)

_Drawing = Callable[[], contextlib.AbstractContextManager[None]]
#: Why a pass is not as captured although its Python was.
KEPT = "somebody keeps a tensor of it"


class Others(Protocol):
    """The ranks that compute a pass with this one, each with Python of its own."""

    def confirming(self, leave: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Inside, Python confirms a pass; ``leave`` is called where another's goes another way."""

    def leave(self) -> None:
        """Says that the Python of this rank goes another way. Collective: TP_GROUP."""

    def confirmed(self) -> None:
        """Says that it came to its end as recorded. Collective: TP_GROUP."""


class Nobody:
    """No other ranks, or such as are told otherwise; see ``Others``."""

    def confirming(self, leave: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """See ``Others``."""
        return contextlib.nullcontext()

    def leave(self) -> None:
        """See ``Others``."""

    def confirmed(self) -> None:
        """See ``Others``."""


class Confirming(TorchFunctionMode):
    """Answers the calls of a pass from its tape, as long as they are those of the tape.

    Args:
        promised: the tape; what is asked ahead is answered as there.
        device: where the pass is computed.
        devices: the types of those that autocast may be on for.
        random: of the step.
        give: gives the tensors that the pass is given, when they are needed.
        others: the ranks that compute the pass with this one.
        is_as_written: compiled modules run as they are written.
        known_hooks: hooks of saved tensors that are around every pass.
        computing: a context for what is computed from the tape, where Python leaves it.

    Attributes:
        is_off: Python has gone another way; everything is computed as it is called.
        other_way: where it has; "" if it has not.
        is_inside: a call is in progress: what that calls is part of it.
    """

    def __init__(
        self,
        promised: Promised,
        device: torch.device,
        devices: tuple[str, ...],
        random: Keyed,
        give: Callable[[], Sequence[torch.Tensor | None]],
        others: Others,
        *,
        is_as_written: bool = False,
        known_hooks: Any = None,
        computing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self._promised = promised
        self._events = promised.events
        self._at = 0
        self._device = device
        self._device_type = device.type
        self._is_as_written = is_as_written
        self._devices = devices
        self._hooks = known_hooks
        self._random = random
        self._give = give
        self._others = others
        self._computing = computing
        #: What is done with tensors of the pass, once there are any: before which event, and with
        #: which of them.
        self._later: deque[tuple[int, int, Callable[[torch.Tensor], None]]] = deque()
        self._open: list[_Draw] = []
        #: Objects that this pass has made for itself, by their numbers.
        self._owned: dict[int, Any] = {}
        self.is_off = False
        self.other_way = ""
        self.is_inside = False

    @contextlib.contextmanager
    def confirming(self) -> Iterator[None]:
        """Inside, calls are compared and answered."""
        regions = checkpointing_replaced(self._regions_compared)
        with (
            standing_between(self),
            regions,
            self,
            self._others.confirming(self._leave_with_others),
        ):
            yield

    def _regions_compared(self, around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            self._pass_by_casts()
            event = None if self._at == len(self._events) else self._events[self._at]
            stops = stops_early((function, *args))
            is_known = (
                isinstance(event, RegionBegins)
                and event.stops_early == stops
                and event.settings.hold(self._devices, self._hooks)
            )
            if self.is_off or not is_known or args[1] is not noop_context_fn:
                self.leave_if_on("a call is checkpointed that was not")
                yield from around(function, *args, **kwargs)
                return
            self._at += 1
            yield
            self._pass_by_casts()
            if not self.is_off:
                is_over = self._at < len(self._events) and isinstance(
                    self._events[self._at], RegionEnds
                )
                self._at += is_over
                if not is_over:
                    self.leave("a checkpointed call ended earlier")

        def other(*args: Any) -> Any:
            self.leave_if_on("a call is checkpointed with use_reentrant=True")
            return reentrant(*args)

        return region, other

    def leave_if_on(self, why: str) -> None:
        """Leaves the tape, if that has not been done; see ``leave``."""
        if not self.is_off:
            self.leave(why)

    def end(self, results: Sequence[torch.Tensor]) -> None:
        """Compares what the pass gives; goes off the tape if that is not over, or gives others."""
        if self.is_off:
            return
        self._pass_by_casts()
        is_over = self._at == len(self._events)
        if not is_over:
            self.leave(f"it ended before {_name_of(self._events[self._at])}")
        elif not same(self._promised.results, tuple(results), self._is_like):
            self.leave("it gave other tensors")

    # ------------------------------------------------------------------ calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        event = self._expected(func, args, kwargs)
        if event is None or (event.is_asked_again and not self._is_answered_alike(event)):
            return self._other(func, args, kwargs or {})
        self._at += 1
        return event.result if event.is_fixed else filled(event.result, self._own)

    def _is_answered_alike(self, event: Call) -> bool:
        """Whether tensors from outside answer what they did when they were asked first."""
        args, kwargs = filled((event.args, event.kwargs), self._own)
        return same(event.result, event.function(*args, **kwargs), self._is_like)

    def _expected(self, function: Any, args: Any, kwargs: Any) -> Call | None:
        """Returns the next call of the tape, if it is this one."""
        if self.is_off or self._at == len(self._events) or is_watched_below():
            return None
        if self._open:
            self._open[-1].check_seeds(self._device.type)
        event = self._events[self._at]
        # This runs for every call of every pass, while a device waits: most arguments are promises
        # and constants, which are the same objects.
        if (
            type(event) is not Call
            or (function is not event.function and function != event.function)
            or len(args) != len(event.args)
        ):
            return None
        for want, got in zip(event.args, args, strict=True):
            if want is not got and not same(want, got, self._is_like):
                return None
        if (kwargs or event.kwargs) and not same(event.kwargs, kwargs or {}, self._is_like):
            return None
        if not event.computes:
            return event if event.settings.hold_for_views() else None
        return event if event.settings.hold(self._devices, self._hooks) else None

    def take_compiled(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See ``Between``: Python runs as it is written, and is compared with what it called."""
        if not self.is_off and (self._is_as_written or has_state((args, kwargs))):
            return call_as_written(module, args, kwargs)
        with self.aside():
            event = self._expected(module, args, kwargs)
            if event is None:
                return self._other(module, args, kwargs)
            inside: Promised = event.inside
            given = tensors_in((args, kwargs))
            own = _with_others((tuple(args), dict(kwargs)), inside.given(0, len(given)))
            confirming = self._confirming_inside(inside, given)
        with confirming.confirming():
            result = call_as_written(module, *own)
            del own
            confirming.end(tensors_in(result))
        if not confirming.is_off and not self.is_off:
            del result
            if not inside.are_held([]):
                self._at += 1
                return event.result if event.is_fixed else filled(event.result, self._own)
            confirming.leave(KEPT)
            result = None
        self.other_way = confirming.other_way
        with self.aside():
            if result is None or not confirming.is_off:
                result = module(*args, **kwargs)
            inside.renew()
        return result

    def _confirming_inside(self, inside: Promised, given: list[torch.Tensor]) -> Confirming:
        def give() -> list[torch.Tensor]:
            self.leave_if_on("a compiled module did something else")
            # Others of their own, since promises become them.
            return [each.view_as(each) for each in given]

        return Confirming(
            inside,
            self._device,
            self._devices,
            self._random,
            give,
            Nobody(),
            is_as_written=True,
            known_hooks=self._hooks,
        )

    def take(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See ``Between``."""
        if self.is_off:
            return function(*args, **kwargs)
        with self.aside():
            return self.__torch_function__(function, (), args, kwargs)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """See ``Between``."""
        former, self.is_inside = self.is_inside, True
        try:
            with function_modes_left():
                yield
        finally:
            self.is_inside = former

    def when_real(self, tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
        """See ``Between``."""
        if self.is_off:
            with self.aside():
                do(tensor)
        else:
            # Nobody holds a promise who does not want to keep it.
            self._later.append((self._at, self._promised.numbers[id(tensor)], do))

    def _other(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.is_off:
            return function(*args, **kwargs)
        if not self._is_of_host(function, args, kwargs):
            if self._pass_by_casts():
                return self.__torch_function__(function, (), args, kwargs)
            self.leave(self._way_of(function))
        result = function(*args, **kwargs)
        if not self.is_off and any(map(self._is_of_device, tensors_in(result))):
            self.leave(self._way_of(function))
        return result

    def _way_of(self, function: Any) -> str:
        """Returns what was called in place of the next call of the tape."""
        was = "it was at its end"
        if self._at < len(self._events):
            expected = self._events[self._at]
            was = f"{_name_of(expected)} was"
            if isinstance(expected, Call) and function == expected.function:
                was = "its arguments or torch's settings were others"
        file, line = calling_line()
        return f"{_name(function)} is called in {Path(file).name}:{line} where {was}"

    def _pass_by_casts(self) -> bool:
        """Goes past what says that autocast forgets; returns whether there was such."""
        before = self._at
        while self._at < len(self._events) and type(self._events[self._at]) is CastsForgotten:
            self._at += 1
        return self._at > before

    def _is_of_host(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call is none of the tape's: it was made without tensors of the device."""
        if function not in self._promised.tape.on_host:
            return False
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self._device_type:
            return False
        return not any(map(self._is_of_device, tensors_in((args, kwargs))))

    def _is_of_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device_type

    def _is_like(self, want: Any, got: Any) -> bool:
        if isinstance(want, Own):
            return type(got) is want.kind and self._owned.setdefault(want.number, got) is got
        return isinstance(want, OnHost) and want.is_like(got)

    def _own(self, reference: Made | Earlier | Own) -> Any:
        assert isinstance(reference, Own), "promises stand in the places of tensors"
        return self._owned[reference.number]

    # ------------------------------------------------------------------ random numbers

    def drawing(
        self, key: tuple[str, int, int], lane: int, seeded: _Drawing
    ) -> contextlib.AbstractContextManager[None]:
        """Stands around a draw: compares its key."""
        if self.is_off or self.is_inside:
            return seeded()
        self._pass_by_casts()
        event = self._events[self._at] if self._at < len(self._events) else None
        if isinstance(event, DrawBegins) and (event.key, event.lane) == (key, lane):
            self._at += 1
            return _Draw(self, event, seeded if event.on_host else None)
        self.leave(f"{key[0]} draws random numbers")
        return seeded()

    def has_drawn(self, has: Callable[[], bool]) -> bool:
        """Tells whether numbers were drawn in the innermost draw."""
        return has() if self.is_off or self.is_inside else self._open[-1].event.drew

    def enter_draw(self, draw: _Draw) -> None:
        """Takes note of a draw of the tape."""
        self._open.append(draw)
        draw.seeds = seeds(self._device.type)

    def leave_draw(self, draw: _Draw) -> None:
        """Takes note that it is over."""
        self._open.remove(draw)
        if self.is_off:
            return
        self._pass_by_casts()
        if self._at < len(self._events) and isinstance(self._events[self._at], DrawEnds):
            self._at += 1
        else:
            self.leave("a draw of random numbers ended otherwise")

    # ------------------------------------------------------------------ another way

    def leave(self, why: str) -> None:
        """Computes what the tape has been asked for: each promise becomes its tensor.

        Args:
            why: what Python did.
        """
        self.other_way = why
        with self.aside():
            self._others.leave()
            self._leave_with_others()

    def confirmed(self) -> None:
        """Says that all of the pass is as on the tape; another rank may have gone another way."""
        if not self.is_off:
            with self.aside():
                self._others.confirmed()

    def _leave_with_others(self) -> None:
        if not self.is_off:
            self.is_off = True
            self.other_way = self.other_way or "that of another rank did"
            self._keep_promises()

    def _keep_promises(self) -> None:
        for each in self._open:
            each.suspend()
        for promised, tensor in zip(self._promised.promises, self._give(), strict=False):
            if tensor is not None:
                keep(promised, tensor)
        with self._computing(), Running(self._random, self._devices) as running:
            for position, event in enumerate(self._events[: self._at]):
                self._do_later(position)
                result = running.go(event, self._own)
                if isinstance(event, Call):
                    for promised, tensor in pairs(event.result, result):
                        if promised is not tensor:
                            keep(promised, tensor)
                    del result
            self._do_later(self._at)
            for each, draw in zip(self._open, running.draws, strict=True):
                each.go_on(draw)

    def _do_later(self, position: int) -> None:
        """Does what is done with tensors of the pass before an event."""
        while self._later and self._later[0][0] <= position:
            _, number, do = self._later.popleft()
            do(self._promised.promises[number])


def _name_of(event: Event) -> str:
    return _name(event.function) if isinstance(event, Call) else type(event).__name__


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    if name.endswith("__get__"):
        # Of an attribute: a method of what is named for it.
        name = f"the attribute {getattr(function.__self__, '__name__', '')}"
    return str(name)


def _with_others(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns a structure with other tensors in the places of its own."""
    others = iter(tensors)
    return map_tensors(structure, lambda _: next(others))


class _Draw:
    """A draw of the tape that Python makes again.

    Args:
        confirming: compares.
        event: of the tape.
        seeded: seeds the generators, if some numbers are drawn on the host.
    """

    def __init__(self, confirming: Confirming, event: DrawBegins, seeded: _Drawing | None) -> None:
        self._confirming = confirming
        self.event = event
        self._seeded = seeded
        self._inside: contextlib.AbstractContextManager[None] | None = None
        self.seeds: list[int] = []

    def __enter__(self) -> None:
        if self._seeded is not None:
            self.go_on(self._seeded())
            assert self._inside is not None
            self._inside.__enter__()
        self._confirming.enter_draw(self)

    def check_seeds(self, device_type: str) -> None:
        """Makes sure that no code has seeded the generators: a graph draws by the library's keys.

        Raises:
            UnsupportedError: it has, as it had not while the pass was captured.
        """
        if self.seeds != seeds(device_type):
            raise UnsupportedError(
                f"code of {self.event.key[0]} seeds torch's generators (torch.manual_seed, "
                "set_rng_state), and did not in the steps before, whose passes are launched as "
                "CUDA graphs: seed in each step, or between two, or give the step function "
                "cuda_graphs=False."
            )

    def __exit__(self, *exception: object) -> None:
        self._confirming.leave_draw(self)
        self.suspend()

    def suspend(self) -> None:
        """Puts the generators back."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def go_on(self, draw: contextlib.AbstractContextManager[None]) -> None:
        """Goes on with a draw that has begun."""
        self._inside = draw
