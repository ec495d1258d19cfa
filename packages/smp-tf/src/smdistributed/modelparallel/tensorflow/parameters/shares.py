"""Values that know which variables they were computed from.

A process has some of a model's variables, and the gradients of these. What is computed of one of
them alone is what one process would have of it. What is computed of several is a share of what one
process would have, as long as those of the other partitions do not take part.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

#: The model, and the variable in it.
Key = tuple[int, int]
_NAME = "_smp_share"


class Form(enum.Enum):
    """How a value stands to the variables that it was computed from."""

    OWN = "of one variable"
    JOINED = "of several variables, side by side"
    PIECE = "of some of several variables"
    SUM = "the sum of a number of each of several variables"
    MOST = "the greatest of a number of each of several variables"
    LEAST = "the least of a number of each of several variables"
    SOME = "of several variables, of which one process would have more"
    WHOLE = "of all variables of the model, on all processes"


@dataclass(eq=False)
class Family:
    """Variables of one model, or their gradients, of which a script makes one value.

    Args:
        members: returns those that this process has.
        name_of: returns the name of one.
        is_of_gradients: they are gradients that were asked for together.

    Attributes:
        is_even: every process of the pipeline has two or more, so that all of them see when they
            are put together.
    """

    members: Callable[[], frozenset[Key]]
    name_of: Callable[[Key], str]
    is_of_gradients: bool = False
    is_even: bool = True


@dataclass(frozen=True, eq=False)
class Share:
    """What is known of a value.

    Attributes:
        variables: that it was computed from.
        families: that they belong to.
        form: see ``Form``.
        is_padding: the variables are none of the model's, but stand for missing ones.
        padding: how many of the last numbers are of such variables, where it is ``JOINED``.
        pure: scalar tensor; what of the value is to be put together with that of other processes,
            where it is not all.
        base: scalar tensor; what else is in the value: a sum that all processes have.
        made_by: type of the operation that put variables together, where it is ``SOME``.
        is_linear: the numbers of variables are only added up in it, where it is ``SOME``: by the
            variables of this process it has the gradients that one process would have.
        is_kept: it was read from a variable of the script, in which it may have been added up.
        is_variable: it is of the variable itself, which stays what it is, whatever is written.
    """

    variables: frozenset[Key]
    families: frozenset[Family]
    form: Form = Form.OWN
    is_padding: bool = False
    padding: int = 0
    pure: Any = None
    base: Any = None
    made_by: str = ""
    is_linear: bool = False
    is_variable: bool = False
    is_kept: bool = False

    @property
    def is_of_one(self) -> bool:
        """Whether it is of one variable of each model, which correspond."""
        return len({model for model, _ in self.variables}) == len(self.variables)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether it is of one variable of a model, and all that is known of it is that."""
        return (
            self.form is Form.OWN
            and len(self.variables) == 1
            and self.pure is None
            and self.base is None
        )

    @functools.cached_property
    def of_value(self) -> Share:
        """What is known of a value that was computed of this one alone."""
        return replace(self, is_variable=False) if self.is_variable else self

    @functools.cached_property
    def kept(self) -> Share:
        """What is known of a variable of the script that was written with this value."""
        return self if self.is_kept else replace(self, is_kept=True)

    @property
    def is_sum(self) -> bool:
        """Whether numbers of variables are only added up in it."""
        return self.form in (Form.OWN, Form.SUM) or self.is_linear

    @property
    def counted(self) -> frozenset[Family]:
        """The families whose members count: gradients, if it is of some."""
        return frozenset(each for each in self.families if each.is_of_gradients) or self.families

    @property
    def is_complete(self) -> bool:
        """Whether no variable of this process is missing."""
        return all(self.variables >= each.members() for each in self.counted)


def share_of(value: Any) -> Share | None:
    """Returns what is known of a tensor, a variable or a handle; None if it is of no variable."""
    # Tensors make errors of their own for what they do not have, which takes long.
    known = getattr(value, "__dict__", None)
    return None if known is None else known.get(_NAME)


def note(value: Any, share: Share | None) -> None:
    """Notes what is known of a value."""
    if share is not None or share_of(value) is not None:
        setattr(value, _NAME, share)


def merged(shares: Iterable[Share], form: Form, **more: Any) -> Share:
    """Returns what is known of a value that is computed from several."""
    shares = list(shares)
    return Share(
        frozenset().union(*(each.variables for each in shares)),
        frozenset().union(*(each.families for each in shares)),
        form,
        is_padding=all(each.is_padding for each in shares),
        is_kept=any(each.is_kept for each in shares),
        **more,
    )


@functools.lru_cache(maxsize=4096)
def of_same(*shares: Share) -> Share:
    """Returns ``merged`` of plain shares of the same variable; made once."""
    return merged(shares, Form.OWN)
