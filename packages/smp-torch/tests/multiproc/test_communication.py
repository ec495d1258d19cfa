"""The communication API, under every launcher, on four ranks (pp 2 x dp 2) and on one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from world import NamedDict, run, run_fresh, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.testing import (
    Launcher,
    RanksFailedError,
    Worlds,
    cases_of,
    run_ranks,
)
from smdistributed.modelparallel.torch.api.slot import slot

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

TIMEOUT_SECONDS = 6.0
LAUNCHERS: tuple[Launcher, ...] = ("mpirun", "torchrun", "smprun")


def ring(obj: Any, rank_type: smp.RankType) -> Any:
    """Sends to the next rank of a group and returns what came from the former."""
    size, rank = SIZES[rank_type](), RANKS[rank_type]()
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        smp.send(obj, after, rank_type)
        return smp.recv_from(before, rank_type)
    received = smp.recv_from(before, rank_type)
    smp.send(obj, after, rank_type)
    return received


RANKS: dict[smp.RankType, Callable[[], int]] = {
    smp.RankType.WORLD_RANK: smp.rank,
    smp.RankType.MP_RANK: smp.mp_rank,
    smp.RankType.DP_RANK: smp.dp_rank,
    smp.RankType.TP_RANK: smp.tp_rank,
    smp.RankType.PP_RANK: smp.pp_rank,
    smp.RankType.RDP_RANK: smp.rdp_rank,
}
SIZES: dict[smp.RankType, Callable[[], int]] = {
    smp.RankType.WORLD_RANK: smp.size,
    smp.RankType.MP_RANK: smp.mp_size,
    smp.RankType.DP_RANK: smp.dp_size,
    smp.RankType.TP_RANK: smp.tp_size,
    smp.RankType.PP_RANK: smp.pp_size,
    smp.RankType.RDP_RANK: smp.rdp_size,
}
BARRIERS: dict[smp.CommGroup, Callable[[], None]] = {
    smp.MP_GROUP: smp.mp_barrier,
    smp.DP_GROUP: smp.dp_barrier,
    smp.TP_GROUP: smp.tp_barrier,
    smp.PP_GROUP: smp.pp_barrier,
    smp.RDP_GROUP: smp.rdp_barrier,
}
MEMBERS: dict[smp.CommGroup, Callable[[], list[int]]] = {
    smp.WORLD: lambda: list(range(smp.size())),
    smp.MP_GROUP: smp.get_mp_group,
    smp.DP_GROUP: smp.get_dp_group,
    smp.TP_GROUP: smp.get_tp_group,
    smp.PP_GROUP: smp.get_pp_group,
    smp.RDP_GROUP: smp.get_rdp_group,
}


def message_of(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def case_ranks() -> tuple[int, ...]:
    return smp.rank(), smp.pp_rank(), smp.dp_rank(), smp.mp_rank(), smp.rdp_rank(), smp.tp_rank()


def case_payloads_over_every_rank_type() -> None:
    payloads = [None, b"", 0, "small", b"x" * 32_000, b"y" * 1_000_000, [1, {"a": (2.5,)}]]
    for rank_type, size in SIZES.items():
        if size() == 1:
            continue
        for payload in payloads:
            assert ring(payload, rank_type) == payload
        group = MEMBERS[rank_type.group]()
        assert ring(smp.rank(), rank_type) == group[(RANKS[rank_type]() - 1) % size()]


def case_one_hundred_megabytes() -> None:
    if smp.rank() == 0:
        smp.send(bytes(100_000_000), 3, smp.RankType.WORLD_RANK)
    if smp.rank() == 3:
        received = smp.recv_from(0, smp.RankType.WORLD_RANK)
        assert len(received) == 100_000_000
        assert not any(received[:: 1 << 16])


def case_classes_are_kept() -> None:
    received = ring(NamedDict(a=smp.rank()), smp.RankType.WORLD_RANK)
    assert type(received) is NamedDict
    assert received == {"a": (smp.rank() - 1) % smp.size()}


def case_tensors() -> None:
    whole = torch.arange(100_000.0).view(100, 1000)
    view, parameter, both = ring(
        [whole[smp.rank()], nn.Parameter(torch.ones(2)), nn.Parameter(whole[1], False)],
        smp.RankType.WORLD_RANK,
    )
    assert torch.equal(view, whole[(smp.rank() - 1) % smp.size()])
    assert view.untyped_storage().nbytes() == view.nbytes
    assert type(parameter) is type(both) is nn.Parameter
    assert parameter.requires_grad
    assert not both.requires_grad


def case_broadcast_to_every_group() -> None:
    for rank_type in RANKS:
        group, size, rank = rank_type.group, SIZES[rank_type](), RANKS[rank_type]()
        for source in range(size):
            if rank == source:
                smp.broadcast({"from": smp.rank()}, group)
            else:
                received = smp.recv_from(source, rank_type)
                assert received == {"from": MEMBERS[group]()[source]}


def case_allgather_in_every_group() -> None:
    for group, members in MEMBERS.items():
        assert smp.allgather((smp.rank(), None, b""), group) == [
            (rank, None, b"") for rank in members()
        ]


def case_barriers_of_every_group() -> None:
    for group, short in BARRIERS.items():
        for barrier in (short, functools.partial(smp.barrier, group)):
            time.sleep(0.02 * smp.rank())
            before = time.monotonic()
            barrier()
            after = time.monotonic()
            entered = smp.allgather((before, after), group)
            assert max(one[0] for one in entered) <= min(one[1] for one in entered)
    smp.barrier()


def case_send_returns_after_the_receive() -> None:
    if smp.rank() == 0:
        smp.send("late", 1, smp.RankType.WORLD_RANK)
        returned = time.monotonic()
        assert returned >= smp.recv_from(1, smp.RankType.WORLD_RANK)
    elif smp.rank() == 1:
        time.sleep(0.3)
        began = time.monotonic()
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "late"
        smp.send(began, 0, smp.RankType.WORLD_RANK)


def case_messages_of_one_sender_keep_their_order() -> None:
    count = 50
    if smp.rank() == 0:
        for number in range(count):
            smp.send(bytes(number * 997 % 20_000), 2, smp.RankType.WORLD_RANK)
            if number % 10 == 0:
                smp.broadcast(number, smp.WORLD)
    else:
        for number in range(count):
            if smp.rank() == 2:
                received = smp.recv_from(0, smp.RankType.WORLD_RANK)
                assert received == bytes(number * 997 % 20_000)
            if number % 10 == 0:
                assert smp.recv_from(0, smp.RankType.WORLD_RANK) == number


def case_unpicklable_objects_send_nothing() -> None:
    unpicklable = lambda: None  # noqa: E731
    for call in (
        lambda: smp.send(unpicklable, (smp.rank() + 1) % smp.size(), smp.RankType.WORLD_RANK),
        lambda: smp.broadcast(unpicklable, smp.WORLD),
        lambda: smp.allgather(unpicklable, smp.WORLD),
    ):
        assert "Nothing was sent" in message_of(CommError, call)
    # Had anything been sent, this would receive it.
    assert ring("clean", smp.RankType.WORLD_RANK) == "clean"
    assert smp.allgather("clean", smp.WORLD) == ["clean"] * smp.size()


def case_wrong_ranks() -> None:
    for rank_type, size in SIZES.items():
        for wrong in (-1, size()):
            message = message_of(ValueError, functools.partial(smp.send, 1, wrong, rank_type))
            assert f"0 .. {size() - 1}" in message
            assert str(wrong) in message
            message_of(ValueError, functools.partial(smp.recv_from, wrong, rank_type))
        own = RANKS[rank_type]()
        assert "itself" in message_of(ValueError, functools.partial(smp.send, 1, own, rank_type))
        message_of(ValueError, functools.partial(smp.recv_from, own, rank_type))
    wrong_calls: list[Callable[[], object]] = [
        lambda: smp.send(1, "1", smp.RankType.WORLD_RANK),  # type: ignore[arg-type]
        lambda: smp.send(1, True, smp.RankType.WORLD_RANK),
        lambda: smp.send(1, 0, smp.WORLD),  # type: ignore[arg-type]
        lambda: smp.recv_from(0, "WORLD_RANK"),  # type: ignore[arg-type]
        lambda: smp.allgather(1, smp.RankType.WORLD_RANK),  # type: ignore[arg-type]
        lambda: smp.broadcast(1, "WORLD"),  # type: ignore[arg-type]
        lambda: smp.barrier(0),  # type: ignore[arg-type]
    ]
    for call in wrong_calls:
        message_of(TypeError, call)


def case_different_calls_on_one_group_name_both() -> None:
    own = (lambda: smp.allgather(1, smp.WORLD)) if smp.rank() == 2 else smp.barrier
    message = message_of(CommError, own)
    assert "barrier(WORLD)" in message
    assert "allgather(..., WORLD)" in message
    assert "rank 0" in message
    assert "rank 2" in message
    # The group is in step again.
    assert smp.allgather(smp.rank(), smp.WORLD) == list(range(smp.size()))


def case_another_call_than_from_first_names_both() -> None:
    communicator = slot.get().communicator
    for odd_rank in (0, 3):
        own = smp.barrier
        if smp.rank() != odd_rank:
            own = functools.partial(communicator.from_first, 1, smp.WORLD)
        message = message_of(CommError, own)
        assert "barrier(WORLD)" in message
        assert "from_first(..., WORLD)" in message
    assert communicator.from_first(smp.rank(), smp.WORLD) == 0


def case_what_is_opened_is_had_by_those_who_join() -> None:
    communicator = slot.get().communicator
    for number, size in enumerate((1, 5000, 1, 1)):
        if smp.rank() == 0:
            began = time.monotonic()
            communicator.open([number] * size, smp.WORLD, "a test")
            if number == 0:
                assert time.monotonic() - began < 0.2
        else:
            time.sleep(0.3 if number == 0 else 0)
            assert communicator.join(smp.WORLD, "a test") == [number] * size
        if number % 2:
            assert communicator.from_first(number, smp.WORLD) == number


def case_who_makes_another_call_is_told() -> None:
    communicator = slot.get().communicator
    for odd_rank in (0, 2):
        if smp.rank() == odd_rank:
            message = message_of(CommError, smp.barrier)
        elif smp.rank() == 0:
            communicator.open("news", smp.WORLD, "a test")
            message = message_of(CommError, smp.barrier)
        elif odd_rank == 0:
            message = message_of(CommError, lambda: communicator.join(smp.WORLD, "a test"))
        else:
            assert communicator.join(smp.WORLD, "a test") == "news"
            continue
        assert "barrier(WORLD)" in message
        assert "a test, which WORLD makes together" in message
    # The group is in step again.
    smp.barrier()


def case_what_is_told_is_heard_in_order() -> None:
    communicator = slot.get().communicator
    # Small, larger than what arrives alone, and more of them than may be on their way.
    news = [*range(200), b"x" * 5000, "last"]
    if smp.rank() == 0:
        for each in news:
            communicator.tell(each, smp.WORLD)
        assert communicator.from_first("next", smp.WORLD) == "next"
    else:
        time.sleep(0.1)
        assert [communicator.hear(smp.WORLD) for _ in news] == news
        assert communicator.from_first(None, smp.WORLD) == "next"


def case_the_last_a_rank_that_never_comes_is_named() -> float:
    """Last, since its calls stay without their partners."""
    began = time.monotonic()
    if smp.rank() == 3:
        time.sleep(TIMEOUT_SECONDS + 2)
        return 0
    call = f"recv_from(3, {smp.RankType.WORLD_RANK.name})"
    with pytest.raises(CommError) as raised:
        smp.recv_from(3, smp.RankType.WORLD_RANK)
    assert raised.value.missing_ranks == (3,)
    message = f"rank {smp.rank()}: {call} cannot complete: rank 3 did not answer"
    assert message in str(raised.value)
    return time.monotonic() - began


CONFIG = {"pipeline_parallel_degree": 2, "ddp": True, "communication_timeout": TIMEOUT_SECONDS}


@pytest.mark.parametrize(
    ("launcher", "case"),
    [
        # Processes of mpirun and smprun talk as copies over MPI do, those of torchrun as others.
        pytest.param(launcher, case, marks=() if "fork" in launcher else pytest.mark.slow)
        for launcher in (*LAUNCHERS, "fork", "smprun-fork")
        for case in cases_of(globals())
    ],
)
def test_case(worlds: Worlds, launcher: Launcher, case: str) -> None:
    results = run(worlds, world_of(4, CONFIG, launcher), cases_of(globals())[case])
    if case == "ranks":
        assert [result[0] for result in results] == [0, 1, 2, 3]
        assert sorted(result[1:3] for result in results) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    if case.endswith("is_named"):
        assert all(TIMEOUT_SECONDS <= seconds < TIMEOUT_SECONDS + 5 for seconds in results[:3])


def talk_alone() -> None:
    smp.init({"pipeline_parallel_degree": 1})
    for group in smp.CommGroup:
        assert smp.allgather(smp.rank(), group) == [0]
        smp.barrier(group)
        smp.broadcast("to nobody", group)
    for barrier in BARRIERS.values():
        barrier()
    for rank_type in smp.RankType:
        assert "itself" in message_of(ValueError, functools.partial(smp.send, 1, 0, rank_type))
        message_of(ValueError, functools.partial(smp.recv_from, 1, rank_type))
    with pytest.raises(CommError, match="Nothing was sent"):
        smp.allgather(lambda: None, smp.WORLD)


def test_a_world_of_one() -> None:
    run_fresh(1, talk_alone)


SCRIPT = """
import smdistributed.modelparallel.torch as smp

smp.init({"pipeline_parallel_degree": 2, "ddp": True, "communication_timeout": 60})
smp.barrier()
if smp.rank() == 1:
    raise SystemExit(5)
smp.barrier()
"""


# The failure matrix has cells of its own for each launcher.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_raising_system_exit_ends_the_peers(launcher: Launcher, tmp_path: Any) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    with pytest.raises(RanksFailedError, match=r"rank(:| +:)? 1") as raised:
        run_ranks(2, script, launcher=launcher, timeout=120)
    assert "no end within" not in str(raised.value)
    assert raised.value.outcome.exit_code
