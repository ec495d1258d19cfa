from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.topology import PLACEMENT_WORDS, Topology

_VECTORS = yaml.safe_load((Path(__file__).parent / "data" / "rank_vectors.yaml").read_text())
_CASES = [(vector, placement) for vector in _VECTORS for placement in vector["placement"]]


def _as_lists(groups: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [list(members) for members in groups]


@pytest.mark.parametrize(
    ("vector", "placement"),
    _CASES,
    ids=[f"{placement}-pp{v['pp']}-tp{v['tp']}" for v, placement in _CASES],
)
def test_documented_tables(vector: dict[str, Any], placement: str) -> None:
    topology = Topology(
        vector["pp"] * vector["tp"] * vector["rdp"], vector["pp"], vector["tp"], placement
    )
    assert topology.rdp_size == vector["rdp"]
    coordinates = [topology.coordinates(rank) for rank in range(topology.size)]
    for name in ("pp_rank", "tp_rank", "rdp_rank", "mp_rank", "dp_rank"):
        assert [getattr(c, name) for c in coordinates] == vector[name], name
    for name in ("PP_GROUP", "TP_GROUP", "RDP_GROUP", "MP_GROUP", "DP_GROUP"):
        assert _as_lists(topology.groups(CommGroup[name])) == vector[name], name


@pytest.mark.parametrize("most", [24, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("word", PLACEMENT_WORDS)
def test_properties_of_every_small_topology(word: str, most: int) -> None:
    for p in range(1, most + 1):
        for t in range(1, most // p + 1):
            for d in range(1, most // (p * t) + 1):
                _check_properties(Topology(p * t * d, p, t, word), p, t, d)


@pytest.mark.parametrize("word", PLACEMENT_WORDS)
def test_ranks_that_share_sequences_are_next_to_replicas(word: str) -> None:
    topology = Topology(48, 2, 2, word, cp_size=3)
    assert (topology.dp_size, topology.rdp_size, topology.mp_size) == (8, 4, 4)
    assert (topology.dp_cp_size, topology.rdp_cp_size) == (24, 12)
    plain = Topology(48, 2, 2, word)
    for rank in range(48):
        own, without = topology.coordinates(rank), plain.coordinates(rank)
        assert own.rdp_cp_rank == without.rdp_rank == own.rdp_rank * 3 + own.cp_rank
        assert (own.pp_rank, own.tp_rank) == (without.pp_rank, without.tp_rank)
        assert topology.rank_of(own.pp_rank, own.tp_rank, own.rdp_rank, own.cp_rank) == rank
        for group, other in (
            (CommGroup.DP_CP_GROUP, CommGroup.DP_GROUP),
            (CommGroup.RDP_CP_GROUP, CommGroup.RDP_GROUP),
            (CommGroup.MP_GROUP, CommGroup.MP_GROUP),
        ):
            assert topology.members(group, rank) == plain.members(other, rank)
        sharing = topology.members(CommGroup.CP_GROUP, rank)
        assert [topology.coordinates(each).cp_rank for each in sharing] == [0, 1, 2]
        assert {topology.coordinates(each)[:5] for each in sharing} == {own[:5]}


@pytest.mark.parametrize("word", PLACEMENT_WORDS)
def test_properties_of_4096_ranks(word: str) -> None:
    _check_properties(Topology(4096, 16, 8, word), 16, 8, 32)


def _check_properties(topology: Topology, p: int, t: int, d: int) -> None:
    size = p * t * d
    assert (topology.pp_size, topology.tp_size, topology.rdp_size) == (p, t, d)
    assert topology.mp_size * topology.rdp_size == size
    assert topology.pp_size * topology.dp_size == size
    assert topology.rdp_size * topology.tp_size == topology.dp_size
    assert (topology.mp_size * topology.dp_size == size) is (t == 1)

    coordinates = [topology.coordinates(rank) for rank in range(size)]
    triples = [(c.pp_rank, c.tp_rank, c.rdp_rank) for c in coordinates]
    assert set(triples) == {(i, j, k) for i in range(p) for j in range(t) for k in range(d)}
    assert [topology.rank_of(*triple) for triple in triples] == list(range(size))

    own: dict[CommGroup, list[tuple[int, ...]]] = {}
    for group in CommGroup:
        all_groups = topology.groups(group)
        assert sorted(r for members in all_groups for r in members) == list(range(size))
        assert [m[0] for m in all_groups] == sorted(m[0] for m in all_groups)
        own[group] = [()] * size
        for members in all_groups:
            assert topology.members(group, members[0]) == members
            assert topology.members(group, members[-1]) == members
            assert list(members) == sorted(members)
            for position, rank in enumerate(members):
                own[group][rank] = members
                assert topology.group_rank(group, rank) == position

    assert own[CommGroup.WORLD][0] == tuple(range(size))
    for rank, c in enumerate(coordinates):
        tp = own[CommGroup.TP_GROUP][rank]
        mp = set(own[CommGroup.MP_GROUP][rank])
        dp = set(own[CommGroup.DP_GROUP][rank])
        assert mp & dp == set(tp)
        assert mp == {r for peer in tp for r in own[CommGroup.PP_GROUP][peer]}
        assert dp == {r for peer in tp for r in own[CommGroup.RDP_GROUP][peer]}
        assert topology.group_rank(CommGroup.PP_GROUP, rank) == c.pp_rank
        assert topology.group_rank(CommGroup.TP_GROUP, rank) == c.tp_rank
        assert topology.group_rank(CommGroup.RDP_GROUP, rank) == c.rdp_rank
        assert topology.group_rank(CommGroup.MP_GROUP, rank) == c.mp_rank
        assert topology.group_rank(CommGroup.DP_GROUP, rank) == c.dp_rank


def test_names_of_placements() -> None:
    assert Topology(8, 2).word == "DPT"
    assert Topology(8, 2, placement="spread").word == "TPD"
    assert Topology(8, 2, placement="PTD").word == "PTD"


@pytest.mark.parametrize("placement", ["dpt", "DP", "DPTT", "Cluster", ""])
def test_unknown_placement(placement: str) -> None:
    with pytest.raises(ConfigError, match="cluster, spread, DPT, DTP, PDT, PTD, TDP, TPD"):
        Topology(8, placement=placement)


@pytest.mark.parametrize(
    ("size", "pp", "tp", "parts"),
    [
        (
            8,
            3,
            1,
            [
                "(8, over all hosts)",
                "(3)",
                "start 6 or 9 processes",
                "pipeline_parallel_degree to 2 or 4",
            ],
        ),
        (8, 2, 3, ["= 6", "start 6 or 12 processes", "tensor_parallel_degree to 2 or 4"]),
        (2, 4, 1, ["start 4 processes", "pipeline_parallel_degree to 2."]),
        (9, 3, 2, ["start 6 or 12 processes, or set tensor_parallel_degree to 1 or 3."]),
    ],
)
def test_indivisible_size_names_the_nearest_working_values(
    size: int, pp: int, tp: int, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(size, pp, tp)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0,), "number of processes"),
        ((4, 0), "pipeline_parallel_degree"),
        ((4, 1, -1), "tensor_parallel_degree"),
        ((4, 1, 1, "cluster", 0), "context_parallel_degree"),
    ],
)
def test_sizes_below_one(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        Topology(*arguments)


def test_a_size_that_sequences_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"x context_parallel_degree \(2\) = 2.* to 1 or 3\."):
        Topology(9, cp_size=2)


def test_ranks_and_coordinates_out_of_range() -> None:
    topology = Topology(8, 2, 2)
    for rank in (-1, 8):
        with pytest.raises(ValueError, match="between 0 and 7"):
            topology.coordinates(rank)
        with pytest.raises(ValueError, match="between 0 and 7"):
            topology.members(CommGroup.WORLD, rank)
    with pytest.raises(ValueError, match="coordinate P must be between 0 and 1, got 2"):
        topology.rank_of(pp=2, tp=0, rdp=0)


def test_topology_survives_pickling() -> None:
    topology = Topology(8, 2, 2, "spread")
    assert pickle.loads(pickle.dumps(topology)) == topology
