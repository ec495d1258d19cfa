"""Rank numbers and groups."""

from __future__ import annotations

import math

import pytest

from conformance.adapters.base import Adapter
from conformance.registry import Body, Case, add, case, torch_case
from conformance.worlds import FRAMEWORKS

_EVERYWHERE = ("alone", "pipeline", "replicas", "both", "spread")
_KINDS = ("pp", "tp", "rdp", "mp", "dp")


def _everyone(adapter: Adapter, value: object) -> list[object]:
    found: list[object] = adapter.smp.allgather(value, adapter.smp.WORLD)
    return found


@case("smp.rank", worlds=_EVERYWHERE)
def rank_numbers_the_processes(adapter: Adapter) -> None:
    assert _everyone(adapter, adapter.smp.rank()) == list(range(adapter.smp.size()))


@case("smp.size", worlds=_EVERYWHERE)
def size_is_the_number_of_processes(adapter: Adapter) -> None:
    assert len(_everyone(adapter, None)) == adapter.smp.size()
    assert set(_everyone(adapter, adapter.smp.size())) == {adapter.smp.size()}


@case("smp.local_rank", worlds=_EVERYWHERE)
def local_rank_numbers_the_processes_of_a_host(adapter: Adapter) -> None:
    assert _everyone(adapter, adapter.smp.local_rank()) == list(range(adapter.smp.size()))


@case("smp.local_size", worlds=_EVERYWHERE)
def local_size_counts_the_processes_of_a_host(adapter: Adapter) -> None:
    assert set(_everyone(adapter, adapter.smp.local_size())) == {adapter.smp.size()}


def _coordinate(adapter: Adapter, kind: str) -> tuple[int, int]:
    smp = adapter.smp
    return getattr(smp, f"{kind}_rank")(), getattr(smp, f"{kind}_size")()


#: By world and kind: rank and size, for each global rank.
_EXPECTED = {
    ("cluster", 1, 1): {kind: [(0, 1)] for kind in _KINDS},
    ("cluster", 2, 2): {
        "pp": [(0, 2), (1, 2)],
        "tp": [(0, 1)] * 2,
        "rdp": [(0, 1)] * 2,
        "mp": [(0, 2), (1, 2)],
        "dp": [(0, 1)] * 2,
    },
    ("cluster", 2, 1): {
        "pp": [(0, 1)] * 2,
        "tp": [(0, 1)] * 2,
        "rdp": [(0, 2), (1, 2)],
        "mp": [(0, 1)] * 2,
        "dp": [(0, 2), (1, 2)],
    },
    ("cluster", 4, 2): {
        "pp": [(0, 2), (1, 2), (0, 2), (1, 2)],
        "tp": [(0, 1)] * 4,
        "rdp": [(0, 2), (0, 2), (1, 2), (1, 2)],
        "mp": [(0, 2), (1, 2), (0, 2), (1, 2)],
        "dp": [(0, 2), (0, 2), (1, 2), (1, 2)],
    },
    ("spread", 4, 2): {
        "pp": [(0, 2), (0, 2), (1, 2), (1, 2)],
        "tp": [(0, 1)] * 4,
        "rdp": [(0, 2), (1, 2), (0, 2), (1, 2)],
        "mp": [(0, 2), (0, 2), (1, 2), (1, 2)],
        "dp": [(0, 2), (1, 2), (0, 2), (1, 2)],
    },
}


def _expected(adapter: Adapter, kind: str) -> tuple[int, int]:
    smp = adapter.smp
    # The placement is told apart by where the second process stands.
    is_spread = smp.size() == 4 and smp.allgather(smp.pp_rank(), smp.WORLD)[1] == 0
    placement = "spread" if is_spread else "cluster"
    return _EXPECTED[placement, smp.size(), smp.pp_size()][kind][smp.rank()]


def _coordinates(kind: str, what: int) -> Body:
    def body(adapter: Adapter) -> None:
        assert _coordinate(adapter, kind)[what] == _expected(adapter, kind)[what]

    return body


for _kind in _KINDS:
    for _what, _name in enumerate(("rank", "size")):
        add(
            Case(
                f"{_kind}_{_name}_of_every_process",
                (f"smp.{_kind}_{_name}",),
                _EVERYWHERE,
                FRAMEWORKS,
                _coordinates(_kind, _what),
            )
        )


@case("config.placement_strategy", "ranks.coordinates", worlds=("both", "spread"))
def placement_orders_the_coordinates(adapter: Adapter) -> None:
    """The last letter varies fastest: DPT keeps a pipeline together, TPD a group of replicas."""
    smp = adapter.smp
    first = [pp for pp, _ in smp.allgather((smp.pp_rank(), smp.rdp_rank()), smp.WORLD)]
    assert first in ([0, 1, 0, 1], [0, 0, 1, 1])
    assert first == [
        _EXPECTED["cluster" if first[1] else "spread", 4, 2]["pp"][r][0] for r in range(4)
    ]


@case("ranks.sizes", worlds=_EVERYWHERE)
def sizes_multiply(adapter: Adapter) -> None:
    smp = adapter.smp
    sizes = {kind: _coordinate(adapter, kind)[1] for kind in _KINDS}
    assert sizes["pp"] * sizes["tp"] * sizes["rdp"] == smp.size()
    assert sizes["mp"] * sizes["rdp"] == sizes["pp"] * sizes["dp"] == smp.size()
    assert sizes["rdp"] * sizes["tp"] == sizes["dp"]


def _members(adapter: Adapter, alike: tuple[str, ...]) -> list[int]:
    """Returns the global ranks whose coordinates of these kinds are this process's."""
    smp = adapter.smp
    own = tuple(_coordinate(adapter, kind)[0] for kind in alike)
    return [rank for rank, other in enumerate(smp.allgather(own, smp.WORLD)) if other == own]


@case("smp.get_mp_group", worlds=_EVERYWHERE)
def mp_group_is_one_replica_of_the_model(adapter: Adapter) -> None:
    assert adapter.smp.get_mp_group() == _members(adapter, ("rdp",))
    assert adapter.smp.get_mp_group()[adapter.smp.mp_rank()] == adapter.smp.rank()


@case("smp.get_dp_group", worlds=_EVERYWHERE)
def dp_group_holds_one_partition(adapter: Adapter) -> None:
    assert adapter.smp.get_dp_group() == _members(adapter, ("pp",))
    assert adapter.smp.get_dp_group()[adapter.smp.dp_rank()] == adapter.smp.rank()


@case("common.in_use.smp_get_tp_group", "compat.get_tp_group_list", worlds=_EVERYWHERE)
def groups_of_the_other_kinds_are_lists_of_global_ranks(adapter: Adapter) -> None:
    smp = adapter.smp
    assert smp.get_tp_group() == [smp.rank()]
    assert smp.rank() in smp.get_tp_group()
    assert smp.get_pp_group() == _members(adapter, ("rdp", "tp"))
    assert smp.get_rdp_group() == _members(adapter, ("pp", "tp"))


@case("ranks.groups", worlds=_EVERYWHERE)
def groups_are_sorted_and_hold_their_caller(adapter: Adapter) -> None:
    smp = adapter.smp
    for kind in _KINDS:
        members = getattr(smp, f"get_{kind}_group")()
        rank, size = _coordinate(adapter, kind)
        assert members == sorted(members)
        assert len(members) == size
        assert members[rank] == smp.rank()


@case("smp.CommGroup", worlds=("alone",))
def comm_group_names_six_kinds(adapter: Adapter) -> None:
    names = {"WORLD", "MP_GROUP", "DP_GROUP", "TP_GROUP", "PP_GROUP", "RDP_GROUP"}
    assert names <= {each.name for each in adapter.smp.CommGroup}


def _constant(name: str) -> Body:
    def body(adapter: Adapter) -> None:
        assert getattr(adapter.smp, name) is adapter.smp.CommGroup[name]

    return body


for _name in ("WORLD", "MP_GROUP", "DP_GROUP"):
    add(Case(f"{_name}_is_the_member", (f"smp.{_name}",), ("alone",), FRAMEWORKS, _constant(_name)))
for _name in ("PP_GROUP", "TP_GROUP", "RDP_GROUP"):
    _rows = ("common.in_use.smp_PP_GROUP",)
    add(Case(f"{_name}_is_the_member", _rows, ("alone",), FRAMEWORKS, _constant(_name)))


@case("smp.RankType", worlds=("alone",))
def rank_type_names_how_ranks_are_counted(adapter: Adapter) -> None:
    names = {each.name for each in adapter.smp.RankType}
    assert {"WORLD_RANK", "MP_RANK", "DP_RANK"} <= names


@case(
    "common.in_use.smp_RankType_PP_RANK",
    "compat.rank_types_of_later_groups",
    worlds=("both", "spread"),
)
def rank_types_of_later_groups_count_inside_them(adapter: Adapter) -> None:
    smp = adapter.smp
    if smp.pp_rank() == 0:
        smp.send(smp.rank(), 1, smp.RankType.PP_RANK)
    else:
        assert smp.recv_from(0, smp.RankType.PP_RANK) == smp.get_pp_group()[0]
    if smp.rdp_rank() == 0:
        smp.send(smp.rank(), 1, smp.RankType.RDP_RANK)
    else:
        assert smp.recv_from(0, smp.RankType.RDP_RANK) == smp.get_rdp_group()[0]


def _vectors() -> list[tuple[str, dict[str, int], list[tuple[int, int, int]]]]:
    """Returns, by hand: 8 processes, two partitions, two tensor ranks, two replicas."""
    sizes = {"D": 2, "P": 2, "T": 2}
    return [
        (word, sizes, [tuple(_digits(rank, word)[letter] for letter in "PTD") for rank in range(8)])  # type: ignore[misc]
        for word in ("DPT", "DTP", "PDT", "PTD", "TDP", "TPD")
    ]


def _digits(rank: int, word: str) -> dict[str, int]:
    bits = f"{rank:03b}"
    return {letter: int(bit) for letter, bit in zip(word, bits, strict=True)}


@case("ranks.vectors", worlds=("new",))
def every_placement_of_eight_processes(adapter: Adapter) -> None:
    """A placement of three twos writes the rank in binary, a letter a digit."""
    from smdistributed.modelparallel.common.config import load
    from smdistributed.modelparallel.common.groups import CommGroup

    for word, sizes, expected in _vectors():
        assert math.prod(sizes.values()) == 8
        degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}
        topology = load("pytorch", {**degrees, "placement_strategy": word}).topology(8)
        found = [topology.coordinates(rank) for rank in range(8)]
        assert [(each.pp_rank, each.tp_rank, each.rdp_rank) for each in found] == expected
        for rank, each in enumerate(found):
            assert topology.members(CommGroup.MP_GROUP, rank)[each.mp_rank] == rank
            assert topology.members(CommGroup.DP_GROUP, rank)[each.dp_rank] == rank


def _process_group(kind: str) -> Body:
    def body(adapter: Adapter) -> None:
        import torch
        import torch.distributed as dist

        smp = adapter.smp
        group = getattr(smp, f"get_{kind}_process_group")()
        members = range(smp.size()) if kind == "world" else getattr(smp, f"get_{kind}_group")()
        number = torch.tensor([smp.rank()], device=getattr(adapter, "device", None))
        dist.all_reduce(number, group=group)
        assert number.item() == sum(members)

    return body


for _kind in ("world", *_KINDS):
    add(
        Case(
            f"{_kind}_process_group_is_for_torch",
            (f"smp.get_{_kind}_process_group",),
            ("replicas", "both", "spread"),
            ("torch",),
            _process_group(_kind),
        )
    )


@torch_case("torch.process_groups_need_ddp")
def process_groups_need_ddp(adapter: Adapter) -> None:
    for kind in ("world", *_KINDS):
        with pytest.raises(RuntimeError, match="ddp"):
            getattr(adapter.smp, f"get_{kind}_process_group")()
