"""One tensor that travels between the ranks of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

from smdistributed.modelparallel.common.planning.schedule import Kind


class Message(NamedTuple):
    """An activation (FORWARD) or its gradient (BACKWARD)."""

    kind: Kind
    value: int
    microbatch: int
    source: int
    target: int
