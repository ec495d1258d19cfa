"""What the code of modules that may be called on one rank goes by, of what hooks on them change."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator

from torch import nn

from smdistributed.modelparallel.torch.state.reach import OF_MODULES, names_in
from smdistributed.modelparallel.torch.state.snapshot import Change, Snapshot


class Surroundings:
    """A module and those in it.

    Args:
        module: the outermost one.
        hooks: on them, whose own code does not count.
    """

    def __init__(self, module: nn.Module, hooks: Iterable[object]) -> None:
        self._modules = set(module.modules())
        self._places = Snapshot(self._modules, apart_from=list(hooks)).places()
        self._names = {name for kind in set(map(type, self._modules)) for name in _names_of(kind)}

    def sees(self, change: Change) -> bool:
        """Whether their code may see a change.

        An attribute of theirs it sees if it has the name of it; what makes the modules does not
        count. What is missed here is found when the modules are called on fakes with the change and
        without (``leaves.attributes``).
        """
        owner = change.owner
        if owner is not None and owner.module in self._modules:
            return owner.attribute in OF_MODULES or owner.attribute in self._names
        if owner is not None and not change.places:
            return any(identity == id(vars(owner.module)) for identity, _ in self._places)
        return not change.places.isdisjoint(self._places)


def _names_of(kind: type[nn.Module]) -> Iterator[str]:
    """Yields the names in the code of a class of modules."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for key, value in vars(base).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, types.FunctionType) and key != "__init__":
                yield from names_in(value.__code__)
