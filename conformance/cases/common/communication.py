"""Objects between processes."""

from __future__ import annotations

import collections
import threading
import time

import pytest

from conformance.adapters.base import Adapter
from conformance.registry import case

_SEVERAL = ("pipeline", "replicas", "both", "spread")


class Sorted(collections.OrderedDict[str, int]):
    """A class of one's own."""


@case("smp.send", "smp.recv_from", worlds=_SEVERAL)
def send_reaches_the_rank_of_its_type(adapter: Adapter) -> None:
    smp = adapter.smp
    last = smp.size() - 1
    if smp.rank() == 0:
        smp.send({"to": "last"}, last, smp.RankType.WORLD_RANK)
    elif smp.rank() == last:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == {"to": "last"}
    for kind in ("mp", "dp"):
        members = getattr(smp, f"get_{kind}_group")()
        own = getattr(smp, f"{kind}_rank")()
        rank_type = smp.RankType[f"{kind.upper()}_RANK"]
        if len(members) > 1 and own == 0:
            smp.send(smp.rank(), 1, rank_type)
        elif own == 1:
            assert smp.recv_from(0, rank_type) == members[0]


@case("smp.recv_from", worlds=("pipeline", "both"))
def messages_of_one_sender_keep_their_order(adapter: Adapter) -> None:
    smp = adapter.smp
    if smp.pp_rank() == 0:
        for number in range(20):
            smp.send(number, 1, smp.RankType.PP_RANK)
    else:
        assert [smp.recv_from(0, smp.RankType.PP_RANK) for _ in range(20)] == list(range(20))


@case("smp.send", worlds=("pipeline",))
def send_waits_for_its_receiver(adapter: Adapter) -> None:
    smp = adapter.smp
    if smp.rank() == 0:
        started = time.monotonic()
        smp.send(None, 1, smp.RankType.WORLD_RANK)
        assert time.monotonic() - started > 0.3
    else:
        time.sleep(0.5)
        smp.recv_from(0, smp.RankType.WORLD_RANK)


@case("smp.send", worlds=("pipeline",))
def ranks_outside_the_group_are_refused(adapter: Adapter) -> None:
    smp = adapter.smp
    for rank in (2, -1, smp.rank()):
        with pytest.raises(ValueError, match="rank"):
            smp.send(None, rank, smp.RankType.WORLD_RANK)
        with pytest.raises(ValueError, match="rank"):
            smp.recv_from(rank, smp.RankType.WORLD_RANK)


@case("smp.broadcast", "compat.broadcast_by_the_root_alone", worlds=("both", "spread"))
def broadcast_is_called_by_the_sender_and_received_by_the_others(adapter: Adapter) -> None:
    smp = adapter.smp
    for group, own, rank_type in (
        (smp.WORLD, smp.rank(), smp.RankType.WORLD_RANK),
        (smp.MP_GROUP, smp.mp_rank(), smp.RankType.MP_RANK),
        (smp.DP_GROUP, smp.dp_rank(), smp.RankType.DP_RANK),
        (smp.PP_GROUP, smp.pp_rank(), smp.RankType.PP_RANK),
    ):
        if own == 1:
            smp.broadcast([group.name], group)
        else:
            assert smp.recv_from(1, rank_type) == [group.name]


@case("smp.broadcast", "smp.allgather", worlds=("pipeline",))
def what_cannot_be_pickled_is_refused_before_anything_is_sent(adapter: Adapter) -> None:
    smp = adapter.smp
    for call in (
        lambda: smp.broadcast(threading.Lock(), smp.WORLD),
        lambda: smp.allgather(threading.Lock(), smp.WORLD),
        lambda: smp.send(threading.Lock(), 1 - smp.rank(), smp.RankType.WORLD_RANK),
    ):
        with pytest.raises(Exception, match="pickle"):
            call()
    assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]


@case("smp.broadcast", worlds=("pipeline",))
def groups_are_of_their_enumeration(adapter: Adapter) -> None:
    smp = adapter.smp
    for call in (smp.broadcast, smp.allgather):
        with pytest.raises(TypeError, match="CommGroup"):
            call(None, "WORLD")
    with pytest.raises(TypeError, match="CommGroup"):
        smp.barrier("WORLD")


@case("smp.allgather", worlds=("alone", *_SEVERAL))
def allgather_gives_the_objects_in_the_order_of_ranks(adapter: Adapter) -> None:
    smp = adapter.smp
    mine = "x" * (1000 * smp.rank()) if smp.rank() % 2 else [smp.rank()]
    for kind in ("world", "mp", "dp", "pp", "tp", "rdp"):
        group = smp.WORLD if kind == "world" else smp.CommGroup[f"{kind.upper()}_GROUP"]
        members = range(smp.size()) if kind == "world" else getattr(smp, f"get_{kind}_group")()
        expected = ["x" * (1000 * rank) if rank % 2 else [rank] for rank in members]
        assert smp.allgather(mine, group) == expected


@case("smp.barrier", worlds=_SEVERAL)
def barrier_waits_for_everyone(adapter: Adapter) -> None:
    smp = adapter.smp
    smp.barrier()
    started = time.monotonic()
    if smp.rank() == smp.size() - 1:
        time.sleep(0.4)
    smp.barrier()
    assert time.monotonic() - started > 0.3


def _waits_for_its_group_alone(adapter: Adapter, kind: str) -> None:
    """Only the group of the last process waits for it."""
    smp = adapter.smp
    barrier = getattr(smp, f"{kind}_barrier")
    members = getattr(smp, f"get_{kind}_group")()
    smp.barrier()
    started = time.monotonic()
    last = smp.size() - 1
    if smp.rank() == last:
        time.sleep(0.8)
    barrier()
    waited = time.monotonic() - started
    assert (waited > 0.6) == (last in members), waited
    smp.barrier()


@case("smp.dp_barrier", worlds=("both", "spread"))
def dp_barrier_waits_for_the_replicas_of_a_partition(adapter: Adapter) -> None:
    _waits_for_its_group_alone(adapter, "dp")


@case("smp.mp_barrier", worlds=("both", "spread"))
def mp_barrier_waits_for_the_partitions_of_a_replica(adapter: Adapter) -> None:
    _waits_for_its_group_alone(adapter, "mp")


@case("common.serialisation", worlds=("pipeline",))
def objects_keep_their_class(adapter: Adapter) -> None:
    smp = adapter.smp
    given = Sorted(b=2, a=1)
    if smp.rank() == 0:
        smp.send(given, 1, smp.RankType.WORLD_RANK)
        smp.broadcast(given, smp.WORLD)
    else:
        for _ in range(2):
            got = smp.recv_from(0, smp.RankType.WORLD_RANK)
            assert type(got) is Sorted
            assert list(got.items()) == [("b", 2), ("a", 1)]
    assert [type(each) for each in smp.allgather(given, smp.WORLD)] == [Sorted, Sorted]


@case("common.serialisation", worlds=("pipeline",))
def tensors_arrive_with_their_numbers(adapter: Adapter) -> None:
    smp = adapter.smp
    x = adapter.batch(3, seed=smp.rank())
    for rank, got in enumerate(smp.allgather(adapter.tensor(x), smp.WORLD)):
        assert adapter.is_tensor(got)
        assert (adapter.array(got) == adapter.batch(3, seed=rank)).all()
