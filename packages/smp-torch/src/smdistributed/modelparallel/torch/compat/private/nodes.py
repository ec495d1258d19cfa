"""Classes that scripts and libraries register as containers, with ``torch.utils._pytree``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Builder:
    """Makes an object of a registered class from its children.

    Attributes:
        kind: the class.
        context: what is known of the object besides its children.
    """

    kind: type
    context: Any

    def __call__(self, children: Iterable[Any]) -> Any:
        return pytree.SUPPORTED_NODES[self.kind].unflatten_fn(list(children), self.context)


def is_node(value: object) -> bool:
    """Tells whether an object is of a registered class."""
    return type(value) in pytree.SUPPORTED_NODES


def flatten_node(value: Any) -> tuple[Sequence[Any], _Builder]:
    """Returns the children of an object of a registered class, and what makes it of others.

    Builders of objects that differ in their children alone are equal.
    """
    children, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    return list(children), _Builder(type(value), context)
