"""Computing what is on a tape, without the Python that recorded it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from smdistributed.modelparallel.torch.tape.settings import Settings
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
    Tape,
    filled,
    numbers_in,
)
from smdistributed.modelparallel.torch.tensors.nested import placeholders, tensors_in


def seeds(device_type: str) -> list[int]:
    """Returns what the generators of torch were seeded with last, on the host and a device."""
    found = [torch.default_generator.initial_seed()]
    if device_type == "cuda":
        found.append(torch.cuda.default_generators[torch.cuda.current_device()].initial_seed())
    return found


class Keyed(Protocol):
    """Random numbers that have keys."""

    def seeded(
        self, key: tuple[str, int, int], lane: int
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, numbers have this key."""


class Running:
    """What holds between the calls of a tape while it is computed.

    Args:
        random: of the step.
        devices: the types of those that autocast may be on for.

    Attributes:
        draws: the draws in progress, the innermost last.
    """

    def __init__(self, random: Keyed, devices: tuple[str, ...]) -> None:
        self._random = random
        self._devices = devices
        self._settings: Settings | None = None
        self._holding = contextlib.ExitStack()
        self.draws: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Running:
        # Casts of weights are kept as long as the outermost context, which is this one.
        torch.autocast_increment_nesting()
        return self

    def __exit__(self, *exception: object) -> None:
        self._holding.close()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()

    def hold(self, settings: Settings) -> None:
        """Has settings hold from now on."""
        if settings != self._settings:
            self._holding.close()
            self._holding.enter_context(settings.holding(self._devices))
            self._settings = settings

    def go(self, event: Event, value: Callable[[Made | Earlier | Own], Any]) -> Any:
        """Does what an event says; returns what a call gives."""
        if isinstance(event, Call):
            if event.is_known:
                return event.result
            if event.numbers is not None:
                return event.numbers.clone()
            self.hold(event.settings)
            args, kwargs = filled((event.args, event.kwargs), value)
            return event.function(*args, **kwargs)
        if isinstance(event, DrawBegins):
            draw = self._random.seeded(event.key, event.lane)
            draw.__enter__()
            self.draws.append(draw)
        elif isinstance(event, DrawEnds):
            self.draws.pop().__exit__(None, None, None)
        elif isinstance(event, CastsForgotten):
            torch.clear_autocast_cache()
        return None


def run(
    tape: Tape,
    given: Sequence[torch.Tensor | None],
    earlier: Callable[[Earlier], torch.Tensor],
    random: Keyed,
    devices: tuple[str, ...],
) -> tuple[Any, dict[int, torch.Tensor]]:
    """Computes a pass from its tape.

    Args:
        tape: of the pass.
        given: the tensors that the pass is given.
        earlier: gives tensors of earlier passes of the microbatch.
        random: keys random numbers.
        devices: the types of those that autocast may be on for.

    Returns:
        what the pass gives, and the tensors that later passes need, by their numbers.
    """
    made = {number: each for number, each in enumerate(given) if each is not None}
    whole = _Run(tape, earlier, random, devices)
    whole.compute(range(len(tape.events)), made)
    results = filled(tape.results, whole.values(made))
    return results, {number: made[number] for number in tape.kept}


class _Run:
    """A pass that is computed from its tape, in parts.

    Args:
        tape: of the pass.
        earlier: gives tensors of earlier passes of the microbatch.
        random: keys random numbers.
        devices: the types of those that autocast may be on for.
    """

    def __init__(
        self,
        tape: Tape,
        earlier: Callable[[Earlier], torch.Tensor],
        random: Keyed,
        devices: tuple[str, ...],
    ) -> None:
        self._tape = tape
        self._earlier = earlier
        self._random = random
        self._devices = devices
        self._last = tape.last_uses()
        self._owned: dict[int, Any] = {}

    def values(self, made: Mapping[int, torch.Tensor]) -> Callable[[Made | Earlier | Own], Any]:
        """Returns what gives what references stand for."""

        def value(reference: Made | Earlier | Own) -> Any:
            if isinstance(reference, Made):
                return made[reference.number]
            if isinstance(reference, Earlier):
                return self._earlier(reference)
            if reference.number not in self._owned:
                self._owned[reference.number] = reference.kind()
            return self._owned[reference.number]

        return value

    def compute(self, positions: range, made: dict[int, torch.Tensor]) -> None:
        """Does some events one after the other.

        Args:
            positions: theirs.
            made: the tensors that there are; what nobody needs any more goes.
        """
        value = self.values(made)
        events, last = self._tape.events, self._last
        with Running(self._random, self._devices) as running:
            position = positions.start
            while position < positions.stop:
                event = events[position]
                if isinstance(event, RegionBegins):
                    running.hold(event.settings)  # without gradients nothing is computed again
                    position = self._region(event, position, made)
                    continue
                result = running.go(event, value)
                if isinstance(event, Call):
                    take(event.result, result, made)
                    for number in numbers_in((event.args, event.kwargs, event.result)):
                        if last[number] == position:
                            made.pop(number, None)
                del result
                position += 1

    def _region(self, region: RegionBegins, begin: int, made: dict[int, torch.Tensor]) -> int:
        """Computes what is computed again in the backward pass; returns where it ends."""
        events, last = self._tape.events, self._last
        end = next(
            each for each in range(begin, len(events)) if isinstance(events[each], RegionEnds)
        )
        calls = [each for each in events[begin:end] if isinstance(each, Call)]
        used = dict.fromkeys(n for each in calls for n in numbers_in((each.args, each.kwargs)))
        inputs = [number for number in used if number in made]
        results = dict.fromkeys(n for each in calls for n in numbers_in(each.result))
        outputs = [n for n in results if last[n] > end and n not in made]

        def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own = dict(zip(inputs, tensors, strict=True))
            self.compute(range(begin + 1, end), own)
            return tuple(own[number] for number in outputs)

        with set_checkpoint_early_stop(region.stops_early):
            given = [made[number] for number in inputs]
            # Draws have keys, so no state of generators is kept.
            found = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
        made.update(zip(outputs, found, strict=True))
        for number in inputs:
            if last[number] <= end:
                made.pop(number)
        return end + 1


def take(template: Any, result: Any, made: dict[int, torch.Tensor]) -> None:
    """Notes the tensors that a call has given, by their numbers."""
    for reference, tensor in pairs(template, result):
        if isinstance(reference, Made):
            made[reference.number] = tensor


def pairs(template: Any, result: Any) -> list[tuple[Any, torch.Tensor]]:
    """Returns what stands in a template for the tensors of a result, with these."""
    references = list(placeholders(template, (Made, Earlier, OnHost, torch.Tensor)))
    return list(zip(references, tensors_in(result), strict=True))
