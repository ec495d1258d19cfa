"""Arguments of a step that lie on the host go to the device of the rank.

Where all tensors that a step function is called with lie on the host, they are copied, as if the
script had written ``x = x.to(device)``. A script that has put any of them on a device places them
itself: then all stay, also one that belongs on the host, such as lengths of sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.microbatch import SplitRules, change_tensors
from smdistributed.modelparallel.torch.compat.private.tensors import overlapping
from smdistributed.modelparallel.torch.execute.bodies import Call
from smdistributed.modelparallel.torch.runtime.tensors import TENSORS


class DeviceCopies:
    """Copies tensors to a device, beside what that computes.

    A copy does not wait for kernels that were launched before, so it is soon done: then the script
    may write to pinned memory again.

    Args:
        device: where copies lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies that the current stream may use."""
        if self._device.type != "cuda":
            return [each.to(self._device) for each in tensors]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = [each.to(self._device, non_blocking=True) for each in tensors]
            self._done = self._stream.record_event()
        current.wait_stream(self._stream)
        for each in copies:
            each.record_stream(current)
        return copies

    def wait(self) -> None:
        """Has the host wait until the copies are made."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None


@dataclass(frozen=True)
class Moved:
    """The tensors of one call that were moved.

    Attributes:
        originals: of the script.
        copies: what took their places.
        versions: of the copies, when they were made.
    """

    originals: Sequence[torch.Tensor]
    copies: Sequence[torch.Tensor]
    versions: Sequence[int]

    def give_back(self) -> None:
        """Writes to the script's tensors what the step has changed in place.

        Raises:
            UnsupportedError: another argument shares the memory, and would not show it.
        """
        versions = [each._version for each in self.copies]
        if versions == self.versions:
            return
        written = {at for at, version in enumerate(self.versions) if version != versions[at]}
        for pair in overlapping(self.originals):
            if not written.isdisjoint(pair):
                raise UnsupportedError(
                    "the step function changes a tensor in place that it was given on the host, "
                    "and another one that it was given shares its memory: on the device that one "
                    "does not show what is written. Change a copy: x = x.clone(), or give both on "
                    "the device: x = x.to(device)."
                )
        with torch.no_grad():
            for at in written:
                self.originals[at].copy_(self.copies[at])


#: Of a call that stays as it is.
NOTHING = Moved([], [], [])


class Mover:
    """Moves the arguments of one step function.

    Args:
        device: of this rank.
        rules: which arguments are split.
        copies: makes the copies.
    """

    def __init__(
        self, device: torch.device, rules: SplitRules, copies: DeviceCopies | None = None
    ) -> None:
        self._device = device
        self._rules = rules
        self._copies = copies or DeviceCopies(device)

    def move(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Moved]:
        """Returns the arguments of a call where they are computed with, and what was moved.

        Containers that are not split stay the script's own, with their tensors.
        """
        given = tuple(args), dict(kwargs)
        if self._device.type == "cpu":
            return given, NOTHING
        found: dict[int, torch.Tensor] = {}

        def find(tensor: torch.Tensor) -> torch.Tensor:
            if not TENSORS.is_state(tensor):
                found[id(tensor)] = tensor
            return tensor

        change_tensors(TENSORS, self._rules, *given, find)
        originals = list(found.values())
        if not originals or any(each.device.type != "cpu" for each in originals):
            return given, NOTHING
        with _versions_counted():
            copies = self._copies.of(originals)
        by_original = dict(zip(found, copies, strict=True))
        call = change_tensors(
            TENSORS, self._rules, *given, lambda each: by_original.get(id(each), each)
        )
        return call, Moved(originals, copies, [each._version for each in copies])

    def end(self, moved: Moved) -> None:
        """Ends a call: its tensors are the script's again, with what was written to them."""
        moved.give_back()
        self._copies.wait()


@contextlib.contextmanager
def _versions_counted() -> Iterator[None]:
    """Inside, tensors are made that count what is written to them, under inference mode too."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
