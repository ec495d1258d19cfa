"""Faults that the suite must notice, a module for each framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: what is wrong.
        file: below ``smdistributed/modelparallel``.
        old: what stands there, once.
        new: what stands there instead.
        cases: that must notice; one suffices.
    """

    name: str
    file: str
    old: str
    new: str
    cases: tuple[str, ...]
