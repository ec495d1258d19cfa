"""Tests on several real processes.

``run_ranks`` runs a body in a new job; the pool ``Worlds`` keeps jobs for many bodies; ``cases_of``
finds the cases of a module. ``plugin`` brings the pool to pytest.
"""

from smdistributed.modelparallel.common.testing.cases import cases_of
from smdistributed.modelparallel.common.testing.jobs import Launcher
from smdistributed.modelparallel.common.testing.run_ranks import (
    Body,
    Outcome,
    RanksFailedError,
    run_ranks,
)
from smdistributed.modelparallel.common.testing.worlds import World, Worlds

__all__ = [
    "Body",
    "Launcher",
    "Outcome",
    "RanksFailedError",
    "World",
    "Worlds",
    "cases_of",
    "run_ranks",
]
