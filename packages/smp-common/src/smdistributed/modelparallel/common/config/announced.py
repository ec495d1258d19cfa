"""What rank 0 tells ``smprun`` of its configuration, part of which only the script knows.

A job that has lost a host starts again with fewer processes, and how many it can have follows from
the degrees, which the script may give to ``smp.init``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from smdistributed.modelparallel.common import first_stderr
from smdistributed.modelparallel.common.config.loading import Config

#: The variable by which smprun asks for it, where it may start the job again.
ANNOUNCED_VARIABLE = "SMP_ANNOUNCE_CONFIGURATION"
_MARK = "\x1esmp-configuration "


def announce(config: Config, rank: int) -> None:
    """Tells smprun what was given, if this is rank 0 and smprun asks."""
    if rank == 0 and os.environ.get(ANNOUNCED_VARIABLE):
        first_stderr.write(f"{_MARK}{json.dumps(config.given())}\n")


def announced(line: str) -> Mapping[str, Any] | None:
    """Returns the parameters that a line of output carries, or None for any other line."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        given = json.loads(text)
    except ValueError:
        return None  # a line of the program that looks like one of ours
    return given if isinstance(given, dict) else None
