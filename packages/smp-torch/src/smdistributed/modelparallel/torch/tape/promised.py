"""A tape whose tensors are promises: what Python is answered from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from smdistributed.modelparallel.torch.tape.promises import promise
from smdistributed.modelparallel.torch.tape.tape import (
    Call,
    Earlier,
    Event,
    Made,
    Own,
    Tape,
    filled,
)
from smdistributed.modelparallel.torch.tensors.nested import retemplate


class Promised:
    """A tape with a promise for each of its tensors.

    Args:
        tape: the tape.
        earlier: those of earlier passes of the microbatch, by their tapes.

    Attributes:
        tape: the tape.
        promises: by their numbers.
        numbers: theirs, by identity.
        events: those of the tape, with promises in the places of references.
        results: what the pass gives.
    """

    def __init__(self, tape: Tape, earlier: dict[int, Promised]) -> None:
        self.tape = tape
        self._earlier = earlier
        self.renew()

    def renew(self) -> None:
        """Makes new promises in place of those that were kept."""
        self.promises = [promise(each) for each in self.tape.specs]
        self.numbers = {id(each): number for number, each in enumerate(self.promises)}
        self.events = [self._with_promises(each) for each in self.tape.events]
        self.results = filled(self.tape.results, self._promise)
        self._counts = self._users()

    def given(self, start: int, count: int) -> list[torch.Tensor]:
        """Returns what stands for tensors that the pass is given."""
        return self.promises[start : start + count]

    def are_held(self, apart_from: Sequence[torch.Tensor]) -> bool:
        """Whether somebody holds a promise whose pass has come to its end.

        Args:
            apart_from: tensors that may be held: they are in objects that later passes get.
        """
        now = self._users()
        if now == self._counts:
            return False
        allowed = set(map(id, apart_from))
        return any(
            count != before and id(each) not in allowed
            for each, count, before in zip(self.promises, now, self._counts, strict=True)
        )

    def _users(self) -> list[int]:
        return list(map(sys.getrefcount, self.promises))

    def _promise(self, reference: Made | Earlier | Own) -> Any:
        assert not isinstance(reference, Own)
        if isinstance(reference, Earlier):
            return self._earlier[id(reference.tape)].promises[reference.number]
        return self.promises[reference.number]

    def _with_promises(self, event: Event) -> Event:
        if not isinstance(event, Call):
            return event
        args, kwargs, result = retemplate(
            (event.args, event.kwargs, event.result), (Made, Earlier), self._promise
        )
        inside = None if event.inside is None else Promised(event.inside, {})
        return replace(event, args=args, kwargs=kwargs, result=result, inside=inside)
