"""Containers that a module is given: what it leaves in them reaches nobody, so it may not.

A module that stays whole may run in another process, on containers of its own. Only objects with
state are the same to all modules; see ``carried.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.state.contents import Contents
from smdistributed.modelparallel.torch.tensors.nested import placeholders


class Given:
    """What is in the containers that a module is given, before its call.

    With ``**`` it gets a dict of its own.

    Args:
        args, kwargs: of the call.
        objects: identities of the objects with state among them.
    """

    def __init__(self, args: Any, kwargs: Any, objects: Collection[int]) -> None:
        self._contents = Contents([*args, *kwargs.values()], objects)

    def refusal(self, name: str, where: str) -> UnsupportedError | None:
        """Returns why what the module has left in them is lost; None if it has left nothing.

        Args:
            name: of the module.
            where: its call is.
        """
        for obj in self._contents.changed():
            return UnsupportedError(
                f"{name} changes a {type(obj).__name__} that it is given, in {where}; nobody "
                "outside would see it, since modules that stay whole may run in another process. "
                "Return what it adds, or give it an object of a class of your own that holds it, "
                "which is neither a container nor a dataclass."
            )
        return None


def has_containers(args: Any, kwargs: Any) -> bool:
    """Whether there is anything among templates of arguments that a module could change."""
    kinds = (list, dict, Container)
    return any(True for each in (*args, *kwargs.values()) for _ in placeholders(each, kinds))


def leaving_as_given(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the call of a module, which is refused if it changes a container.

    Args:
        call: of the module; it is given the objects with state first.
        name: of the module.
    """

    @functools.wraps(call)
    def checked(objects: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        given = Given(args, kwargs, set(map(id, objects)))
        result = call(*args, **kwargs)
        if (refusal := given.refusal(name, "a step")) is not None:
            raise refusal
        return result

    return checked
