"""What ranks compute together and a script gives to parameters as their data.

In one process ``parameter.data = computed`` makes one memory of both. What ranks compute together
has no memory: the parameter gets a copy, and whatever would tell one from the other is refused.
"""

from __future__ import annotations

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import version_of


class GivenData:
    """What was given to parameters since the last step."""

    def __init__(self) -> None:
        self._given: list[tuple[torch.Tensor, int, str]] = []

    def note(self, fake: torch.Tensor, names: str) -> None:
        """Takes note of what a parameter was given.

        Args:
            fake: stands for it, and has its versions.
            names: of the parameters that it was computed from.

        Raises:
            UnsupportedError: another parameter was given the same.
        """
        if any(fake is each for each, _, _ in self._given):
            raise UnsupportedError(
                f"two parameters were given what was computed from {names} as .data, which would "
                "be one memory on several ranks: compute it for each, or tie them before "
                "smp.DistributedModel."
            )
        self._given.append((fake, version_of(fake), names))

    def check(self) -> None:
        """Raises if something was written to after a parameter was given it.

        Raises:
            UnsupportedError: it was; the parameter has not changed with it.
        """
        given, self._given = self._given, []
        for fake, version, names in given:
            if version_of(fake) != version:
                raise UnsupportedError(
                    f"what was computed from {names} was written to after a parameter was given "
                    "it as .data; the parameter, whose memory is on another rank, does not change "
                    "with it: write to the parameter, or before."
                )
