"""Populations some of whose cases end the job, as no step follows one that has failed on a rank.

Such a case counts as what its rank has found, and those behind it are tried in a new job.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.testing import RanksFailedError
from smdistributed.modelparallel.torch.api.slot import slot


class EndedError(Exception):
    """A case has ended the job."""


def check_job(number: int, found: Mapping[Any, int]) -> None:
    """Raises if a step has failed on this rank while others computed theirs.

    Args:
        number: of the case that was tried last.
        found: how often cases came to which end, this one among them.

    Raises:
        EndedError: it has.
    """
    try:
        slot.get().departures.check_intact()
    except SMPError as error:
        raise EndedError(f"case {number} ends the job after {dict(found)!r}: {error}") from error


_ENDED = re.compile(r"case (\d+) ends the job after (\{.*?\}): ")


def ends_of(
    run: Callable[[int], Iterable[Mapping[Any, int]]], first: int, stride: int
) -> dict[Hashable, int]:
    """Returns how often the cases of a population came to which end on a rank.

    Args:
        run: tries cases from one of a number on, in a job; returns what each rank found.
        first: of those to try.
        stride: from one to the next.
    """
    total: Counter[Hashable] = Counter()
    while True:
        try:
            everyones = list(run(first))
        except RanksFailedError as error:
            ended = _ENDED.search(f"{error}{error.outcome.stderr}{error.outcome.stdout}")
            if ended is None:
                raise
            total.update(ast.literal_eval(ended[2]))
            first = int(ended[1]) + stride
        else:
            for each in everyones:  # what absent parameters come to may differ
                total.update(each)
            return dict(total)
