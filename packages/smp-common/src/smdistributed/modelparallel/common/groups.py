"""Names of the groups of ranks and of the rank numbers inside them.

Source: smd_model_parallel_common_api.rst, MPI Basics; smd_model_parallel_general.rst, Ranking
Basics. The tensor-parallel page uses the first six groups; those with CP, the ranks that share a
sequence, are extensions of this library. The rank types follow the groups one to one.
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
    CP_GROUP = "CP_GROUP"
    DP_CP_GROUP = "DP_CP_GROUP"
    RDP_CP_GROUP = "RDP_CP_GROUP"


class RankType(enum.Enum):
    """Which group a rank number counts in."""

    WORLD_RANK = "WORLD_RANK"
    MP_RANK = "MP_RANK"
    DP_RANK = "DP_RANK"
    TP_RANK = "TP_RANK"
    PP_RANK = "PP_RANK"
    RDP_RANK = "RDP_RANK"
    CP_RANK = "CP_RANK"
    DP_CP_RANK = "DP_CP_RANK"
    RDP_CP_RANK = "RDP_CP_RANK"

    @property
    def group(self) -> CommGroup:
        """The group whose members this rank number counts."""
        if self is RankType.WORLD_RANK:
            return CommGroup.WORLD
        return CommGroup[self.name.replace("_RANK", "_GROUP")]
