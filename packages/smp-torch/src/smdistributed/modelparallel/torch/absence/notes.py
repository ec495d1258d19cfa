"""How absent tensors came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: What to do instead.
REMEDY = (
    "Values of all partitions: state_dict() of the DistributedModel, on every rank, and "
    "load_state_dict() to change them; of the own one: local_named_parameters()."
)


@dataclass(frozen=True)
class Call:
    """A call that gave absent tensors.

    Attributes:
        function: what was called.
        args: its arguments, positional and by keyword; absent tensors as their sources.
        versions: of the tensors in them.
        depth: how many calls stand behind it.
        known: what it gave and took, as far as that has been computed, by place.
    """

    function: Callable[..., Any]
    args: tuple[Any, Mapping[str, Any]]
    versions: tuple[int, ...]
    depth: int
    known: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where the values of an absent tensor come from.

    Attributes:
        call: that gave it; None for a model's own tensor, or if that is not known.
        place: which of the tensors that the call gave; from -1 down, of those that it took.
        like: a fake of a model's own tensor, or of a gradient, if it is one.
    """

    call: Call | None = None
    place: int = 0
    like: torch.Tensor | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is a model's own tensor, or a gradient."""
        return self.like is not None

    @property
    def is_noted(self) -> bool:
        """Whether values could be computed."""
        return self.is_own or self.call is not None

    @property
    def known(self) -> torch.Tensor | None:
        """The values, if the ranks have computed them."""
        return None if self.call is None else self.call.known.get(self.place)

    def keep(self, values: torch.Tensor) -> None:
        """Takes note of the values."""
        assert self.call is not None
        self.call.known[self.place] = values


def shortened(names: frozenset[str]) -> str:
    """Returns some names for a message."""
    chosen = sorted(names)
    more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    return ", ".join(chosen[:3]) + more


def name_of(func: Any) -> str:
    """Returns the name of a function of torch."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", None) or getattr(func, "__name__", func))
