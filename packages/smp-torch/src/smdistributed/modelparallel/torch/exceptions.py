"""Compatibility: launch tools take every class in here to recognise the errors of a job."""

from smdistributed.modelparallel.backend.exceptions import *  # noqa: F403
from smdistributed.modelparallel.backend.exceptions import __all__ as __all__
