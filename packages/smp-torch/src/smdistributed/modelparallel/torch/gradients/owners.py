"""Which of the replicas of a parameter updates it, where optimizer state is sharded.

Source: model-parallel-extended-features-pytorch-optimizer-state-sharding.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from smdistributed.modelparallel.torch.gradients.replicas import Replicas


class Owners:
    """The owners of some parameters: whole ones, so that each has about the same to update.

    Args:
        replicas: those that hold the parameters.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._owner: dict[nn.Parameter, int] = {}

    def assign(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives each parameter an owner, which it keeps; every replica finds the same.

        The largest come first, each to the replica that has least.
        """
        kept = {each: self._owner[each] for each in parameters if each in self._owner}
        new = [each for each in parameters if each not in kept]
        loads = [0] * self._replicas.size
        for parameter, owner in kept.items():
            loads[owner] += parameter.numel()
        self._owner = kept
        for parameter in sorted(new, key=lambda each: -each.numel()):
            owner = loads.index(min(loads))
            loads[owner] += parameter.numel()
            self._owner[parameter] = owner

    def of(self, parameter: nn.Parameter) -> int:
        """Returns the replica that updates a parameter."""
        return self._owner[parameter]

    def is_own(self, parameter: nn.Parameter) -> bool:
        """Tells whether this rank updates a parameter."""
        return self._owner[parameter] == self._replicas.own

    def share(self) -> None:
        """Gives each replica the parameters of their owners. Collective: the replicas."""
        for owner in range(self._replicas.size):
            owned = [each for each, of in self._owner.items() if of == owner]
            self._replicas.broadcast_flat(owned, owner)
