"""Objects with state of their own that recorded code hands to modules: a cache, say.

A module may change such an object, and later modules see it. Ranks have no common memory, so each
gets a copy of the object as it was when it was first handed over, for each microbatch, and its
modules share that. While the step is recorded, each module runs once on the object itself and once
on the copy of its rank: if it does not do the same, it depends on what another rank's modules left
in the object, and that is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError


class Carried:
    """Stands in templates for an object with state.

    Args:
        index: position among the carried objects of the graph.
        obj: the object as it is first handed over. Tensors that it holds must be the same in every
            microbatch; they are not copied for the recording.
        constant: gives the real tensor for one of them, or None where it depends on the microbatch.
        where: who hands it over, for messages.

    Attributes:
        pristine: a copy of the object, for the recording.

    Raises:
        UnsupportedError: it holds tensors that depend on the microbatch.
    """

    def __init__(
        self,
        index: int,
        obj: Any,
        constant: Callable[[torch.Tensor], torch.Tensor | None],
        where: str,
    ) -> None:
        self._index = index
        self._constants: dict[int, torch.Tensor] = {}
        held = list(tensors_held(obj))
        for tensor in held:
            real = constant(tensor)
            if real is None:
                raise UnsupportedError(
                    f"{where} passes an object of class {type(obj).__module__}."
                    f"{type(obj).__qualname__} that holds activations between partitions; only "
                    "tensors, containers of tensors and plain constants can be passed. Keep the "
                    "object inside one module, or put the modules that share it on one partition."
                )
            self._constants[id(tensor)] = real
        self.pristine = copy.deepcopy(obj, {id(tensor): tensor for tensor in held})

    def __repr__(self) -> str:
        return f"object {self._index} of class {type(self.pristine).__name__}"

    def stand_in(self) -> Any:
        """Returns the object for one rank in the recording."""
        held = {id(tensor): tensor for tensor in tensors_held(self.pristine)}
        return copy.deepcopy(self.pristine, held)

    def copy(self) -> Any:
        """Returns the object for one rank and microbatch."""
        constants = {key: tensor.clone() for key, tensor in self._constants.items()}
        return copy.deepcopy(self.pristine, constants)


class CarriedObjects:
    """The copies of one rank for one microbatch.

    Args:
        make: gives a new copy.
    """

    def __init__(self, make: Callable[[Carried], Any]) -> None:
        self._make = make
        self._copies: dict[Carried, Any] = {}

    def clear(self) -> None:
        """Lets go of the copies: no module of this rank sees them again."""
        self._copies.clear()

    def __call__(self, carried: Carried) -> Any:
        """Returns the copy that the rank's modules share."""
        if carried not in self._copies:
            self._copies[carried] = self._make(carried)
        return self._copies[carried]


def tensors_held(obj: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Yields the tensors in the attributes of an object, and in containers and objects in them."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif depth and not isinstance(obj, type | torch.nn.Module | str | bytes):
        if isinstance(obj, Mapping):
            items: Any = obj.values()
        else:
            items = obj if isinstance(obj, Sequence) else getattr(obj, "__dict__", {}).values()
        for item in items:
            yield from tensors_held(item, depth - 1)
