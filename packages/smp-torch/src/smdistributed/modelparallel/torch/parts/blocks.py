"""A parameter, or its gradient, of which each rank of a group has a part: its block of numbers."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Protocol

import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.pieces import Part, Rectangle
from smdistributed.modelparallel.torch.absence.tensors import vacant
from smdistributed.modelparallel.torch.compat.private.below import operated_by

#: How many tensors may have seen the memory of one until those that are gone are forgotten.
_MOST_SEEING = 64


class Home(Protocol):
    """What brings the parts of one model's tensors together.

    Attributes:
        held: who has which kind of part of a tensor, for messages.
        view_class: of what sees the memory of a whole tensor between steps.
        when: when parts come together, and what to do otherwise, for messages.
    """

    held: str
    view_class: type[torch.Tensor]
    when: str

    def is_at_rest(self, blocks: Blocks) -> bool:
        """Whether all ranks run the same Python, so that any numbers can be gathered."""

    def prepare(self) -> None:
        """Gets ready for gradients of what is computed outside of steps, if it may have any."""

    def differentiable(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
        """Returns what autograd knows as the whole of a tensor; None where that is itself."""

    def differentiated(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns what a script sees of a gradient that it has asked autograd for."""

    def agree(self, blocks: Blocks) -> None:
        """Waits until all ranks use the same. Collective: the group."""

    def gather(self, blocks: Blocks) -> torch.Tensor:
        """Returns the whole of what ranks have in blocks. Collective: the group."""

    def updated(self) -> None:
        """Takes note that parameters have other values."""


class Blocks:
    """See the module.

    Args:
        name: of the parameter.
        shape: of the whole.
        part: which part of it the block of this rank is.
        values: the block.
        home: what brings the blocks together.
        key: by which that knows the parameter.
        is_gradient: whether these are the numbers of the gradient.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        part: Part,
        values: torch.Tensor,
        home: Home,
        key: Hashable,
        *,
        is_gradient: bool = False,
    ) -> None:
        self.name = name
        self.shape = shape
        self.part = part
        self.values = values
        self._home = weakref.ref(home)  # which has the parameter, too
        self.key = key
        self.is_gradient = is_gradient
        self._seen_by: dict[int, weakref.ref[torch.Tensor]] = {}

    def note_seen_by(self, tensor: torch.Tensor) -> None:
        """Takes note of a tensor that stands for the whole, or sees the memory of that."""
        if len(self._seen_by) > _MOST_SEEING:
            self._seen_by = {id(each): weakref.ref(each) for each in self.seen_by}
        self._seen_by[id(tensor)] = weakref.ref(tensor)

    @property
    def seen_by(self) -> list[torch.Tensor]:
        """What stands for the whole, or sees the memory of that, as far as it was noted."""
        return [each for seeing in self._seen_by.values() if (each := seeing()) is not None]

    @property
    def home(self) -> Home:
        """What brings the blocks together.

        Raises:
            SMPError: its model is gone.
        """
        home = self._home()
        if home is None:
            raise SMPError(
                f"the DistributedModel of parameter {self.name} is gone, and with it the parts "
                "of the other ranks: keep the model as long as its parameters are used."
            )
        return home

    @property
    def is_here(self) -> bool:
        """Whether the block still is on this rank, and not on another partition."""
        return operated_by(self.values) is None

    def let_go(self) -> None:
        """Has no block any more: what sees it asks for what another partition has."""
        self.values = vacant(self.values, self.values.device)

    @property
    def told(self) -> str:
        """What this is, for messages."""
        return f"the gradient of {self.name}" if self.is_gradient else self.name

    @property
    def told_of_ranks(self) -> str:
        """What this is, and who has it, for messages."""
        return f"{self.told}, of which {self.home.held}"

    def like_these(self, values: torch.Tensor, *, is_gradient: bool) -> Blocks:
        """Returns other numbers of the same parameter, or of its gradient."""
        return Blocks(
            self.name,
            self.shape,
            self.part,
            values,
            self.home,
            self.key,
            is_gradient=is_gradient,
        )

    def of_this_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the block of this rank in a whole tensor; it may share memory with that."""
        return taken(whole, self.part)

    def keep(self, whole: torch.Tensor) -> bool:
        """Takes the block of this rank from the whole; returns whether it is another one.

        Equal bits are no write: masters would lose what is more precise in them.
        """
        new = self.of_this_rank(whole)
        if torch.equal(_bits(new), _bits(self.values.detach())):
            return False
        self.values.copy_(new)
        return True


def taken(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """Returns what is held of a whole tensor; it may share memory with that."""
    parts = [whole[each.within(Rectangle.whole(whole.shape))] for each, _ in part.places()]
    return parts[0] if isinstance(part, Rectangle) else torch.cat(parts, part.dim)


def put(whole: torch.Tensor, part: Part, held: torch.Tensor) -> None:
    """Writes what is held of a tensor where it belongs in the whole."""
    for there, here in part.places():
        index = there.within(Rectangle.whole(whole.shape))
        whole[index] = held[here.within(Rectangle.whole(held.shape))].to(whole.device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
