"""How absent tensors came about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.digests import hash_of
from smdistributed.modelparallel.torch.compat.private.modes import (
    is_traced,
    past_subclass_functions,
    pytree,
)

#: What the name of a gradient begins with, before that of its parameter.
GRADIENT_OF = "the gradient of "
#: What to do instead.
REMEDY = (
    "Values of all partitions: state_dict() of the DistributedModel, on every rank, and "
    "load_state_dict() to change them; of the own one: local_named_parameters()."
)


@dataclass(frozen=True)
class Origin:
    """Which ranks of a pipeline have what stands behind a value, the same on all of them.

    Attributes:
        names: of the parameters that it depends on.
        owners: places in the pipeline of the ranks that have those.
        digest: how it came about; see ``absence.digests``.
        is_told: whether one owner alone would know that it has the value: what goes past functions
            of torch, as in transforms of ``torch.func``, it takes for any tensor.
    """

    names: frozenset[str]
    owners: frozenset[int]
    digest: str
    is_told: bool = True

    @classmethod
    def of_call(cls, origins: Iterable[Origin], digest: str) -> Origin:
        """Returns that of what a call gives."""
        names, owners, is_told = frozenset[str](), frozenset[int](), True
        for each in origins:
            names, owners = names | each.names, owners | each.owners
            is_told = is_told and each.is_told
        return cls(names, owners, digest, is_told)

    def at(self, place: str) -> Origin:
        """Returns that of one of the tensors that a call gave, or wrote to."""
        return replace(self, digest=hash_of(self.digest, place))

    def of_gradient(self) -> Origin:
        """Returns that of the gradient of a model's own tensor."""
        names = frozenset(f"{GRADIENT_OF}{each}" for each in self.names)
        return Origin(names, self.owners, hash_of(*sorted(names)))


@dataclass(frozen=True)
class Call:
    """A call that gave absent tensors.

    Attributes:
        function: what was called.
        args: its arguments, positional and by keyword; absent tensors as their sources.
        versions: of the tensors in them.
        depth: how many calls stand behind it, one after the other.
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


def check_forms(func: Any, structure: Any, origins: Iterable[Origin]) -> None:
    """Raises if a function takes or gives what fakes do not stand for.

    Args:
        func: that is called, or was.
        structure: its arguments, or what it gave.
        origins: of what one partition has among them.

    Raises:
        UnsupportedError: a tensor is sparse or nested.
    """
    tensors = [each for each in pytree.tree_leaves(structure) if isinstance(each, torch.Tensor)]
    with past_subclass_functions():
        if all(each.layout is torch.strided and not each.is_nested for each in tensors):
            return
    raise UnsupportedError(
        f"{name_of(func)} takes or makes a sparse or nested tensor, with the values of "
        f"{shortened(Origin.of_call(origins, '').names)}, which one partition has. {REMEDY}"
    )


def not_differentiated(func: Any, names: frozenset[str]) -> UnsupportedError:
    """Returns the error where gradients are asked for that some ranks cannot follow."""
    return UnsupportedError(
        f"{name_of(func)} asks for gradients of what depends on {shortened(names)}, which one "
        "partition has: compute them in a step function, by model.backward."
    )


def check_not_traced(func: Any, names: str) -> None:
    """Refuses a function that ``torch.jit.trace`` would write down on the rank with values alone.

    Raises:
        UnsupportedError: it runs.
    """
    if is_traced():
        raise UnsupportedError(
            f"{name_of(func)} gets {names}, which one partition has, while torch.jit.trace runs: "
            f"trace a module of your own. {REMEDY}"
        )


def name_of(func: Any) -> str:
    """Returns the name of a function of torch."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", None) or getattr(func, "__name__", func))
