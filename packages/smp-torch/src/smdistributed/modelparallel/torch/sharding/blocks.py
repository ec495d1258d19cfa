"""A parameter, or its gradient, of which each rank of a sharding group has a block of numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.pieces import Rectangle


class Home(Protocol):
    """Where the units of one model are."""

    is_read_in_blocks: bool

    def enter(self, units: Iterable[int]) -> None:
        """Makes the parameters of units whole; they stay so until ``leave``."""

    def leave(self, units: Iterable[int]) -> None:
        """Lets units go again."""

    def check_use(self, name: str, what: str) -> None:
        """Raises where no values can be had."""

    def is_at_rest(self, unit: int) -> bool:
        """Whether all ranks run the same Python, so that any numbers can be gathered."""

    def prepare(self) -> None:
        """Gets ready for gradients of what is computed outside of steps, if it may have any."""

    def agree(self, blocks: Blocks) -> None:
        """Waits until all ranks use the same. Collective: the sharding group."""

    def gather(self, blocks: Blocks) -> torch.Tensor:
        """Returns the whole of what ranks have in blocks. Collective: the sharding group."""

    def updated(self) -> None:
        """Takes note that parameters have other values."""


class Blocks:
    """See the module.

    Args:
        name: of the parameter.
        shape: of the whole.
        part: where the block of this rank is in it.
        values: the block.
        home: where the unit of the parameter is.
        unit: number of the unit.
        place: number of the parameter in the unit.
        is_gradient: whether these are the numbers of the gradient.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        part: Rectangle,
        values: torch.Tensor,
        home: Home,
        unit: int,
        place: int,
        *,
        is_gradient: bool = False,
    ) -> None:
        self.name = name
        self.shape = shape
        self.part = part
        self.values = values
        self._home = weakref.ref(home)  # which has the parameter, too
        self.unit = unit
        self.place = place
        self.is_gradient = is_gradient

    @property
    def home(self) -> Home:
        """Where the unit of the parameter is.

        Raises:
            SMPError: its model is gone.
        """
        home = self._home()
        if home is None:
            raise SMPError(
                f"the DistributedModel of parameter {self.name} is gone, and with it the shards "
                "of the other ranks: keep the model as long as its parameters are used."
            )
        return home

    @property
    def told(self) -> str:
        """What this is, for messages."""
        return f"the gradient of {self.name}" if self.is_gradient else self.name

    def like_these(self, values: torch.Tensor, *, is_gradient: bool) -> Blocks:
        """Returns other numbers of the same parameter, or of its gradient."""
        return Blocks(
            self.name,
            self.shape,
            self.part,
            values,
            self.home,
            self.unit,
            self.place,
            is_gradient=is_gradient,
        )

    def of_this_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns a view of the block of this rank in a whole tensor."""
        return whole[self.part.within(Rectangle.whole(self.shape))]

    def keep(self, whole: torch.Tensor) -> bool:
        """Takes the block of this rank from the whole; returns whether it is another one.

        Equal bits are no write: masters would lose what is more precise in them.
        """
        new = self.of_this_rank(whole)
        if torch.equal(_bits(new), _bits(self.values.detach())):
            return False
        self.values.copy_(new)
        return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
