"""Names of the groups of ranks and of the rank numbers inside them.

Source: smd_model_parallel_common_api.rst, MPI Basics; smd_model_parallel_general.rst, Ranking
Basics. The tensor-parallel page uses all six groups; the rank types follow them one to one.
"""

from __future__ import annotations

import enum


class CommGroup(enum.Enum):
    """A kind of group of ranks; every rank belongs to exactly one group of each kind."""

    WORLD = "WORLD"
    MP_GROUP = "MP_GROUP"
    DP_GROUP = "DP_GROUP"
    TP_GROUP = "TP_GROUP"
    PP_GROUP = "PP_GROUP"
    RDP_GROUP = "RDP_GROUP"


class RankType(enum.Enum):
    """Which group a rank number counts in."""

    WORLD_RANK = "WORLD_RANK"
    MP_RANK = "MP_RANK"
    DP_RANK = "DP_RANK"
    TP_RANK = "TP_RANK"
    PP_RANK = "PP_RANK"
    RDP_RANK = "RDP_RANK"

    @property
    def group(self) -> CommGroup:
        """The group whose members this rank number counts."""
        if self is RankType.WORLD_RANK:
            return CommGroup.WORLD
        return CommGroup[self.name.replace("_RANK", "_GROUP")]
