from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.groups import CommGroup, RankType


@pytest.mark.parametrize(
    ("rank_type", "group"),
    [
        (RankType.WORLD_RANK, CommGroup.WORLD),
        (RankType.MP_RANK, CommGroup.MP_GROUP),
        (RankType.DP_RANK, CommGroup.DP_GROUP),
        (RankType.TP_RANK, CommGroup.TP_GROUP),
        (RankType.PP_RANK, CommGroup.PP_GROUP),
        (RankType.RDP_RANK, CommGroup.RDP_GROUP),
        (RankType.CP_RANK, CommGroup.CP_GROUP),
    ],
)
def test_each_rank_type_counts_in_its_group(rank_type: RankType, group: CommGroup) -> None:
    assert rank_type.group is group


def test_there_are_as_many_rank_types_as_groups() -> None:
    assert {rank_type.group for rank_type in RankType} == set(CommGroup)
