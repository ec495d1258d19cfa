"""With whom a process can exchange at present.

A call that several processes make together needs all of them to come to it. While a process runs
code of the user's that the others do not run at the same time, they do not; then it is told so at
once, and not when its time is up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from smdistributed.modelparallel.common.errors import SMPError


class Reach:
    """The processes that run what this one runs: all of them, unless it is said otherwise."""

    def __init__(self) -> None:
        self._only: frozenset[int] | None = None
        self._where = ""

    @contextlib.contextmanager
    def only(self, ranks: Iterable[int], where: str) -> Iterator[None]:
        """Inside, no other processes come to what this one calls.

        Args:
            ranks: global ranks of those that do, this one among them.
            where: code of the user's runs, as in "in step function train".
        """
        former = self._only, self._where
        self._only, self._where = frozenset(ranks), where
        try:
            yield
        finally:
            self._only, self._where = former

    def check(self, call: str, ranks: Iterable[int]) -> None:
        """Raises if some of the processes that a call needs do not come to it.

        Args:
            call: what is called, for the message.
            ranks: global ranks of those that it needs.

        Raises:
            SMPError: some do not.
        """
        if self._only is not None and not self._only.issuperset(ranks):
            self.refuse(call)

    def refuse(self, call: str) -> None:
        """Raises; see ``check``."""
        raise SMPError(
            f"{call} is for several processes together, and was called {self._where}: the others "
            "do not come to this call meanwhile. Call it between two steps, on every rank that it "
            "concerns; what it needs of a step the step function can return."
        )
