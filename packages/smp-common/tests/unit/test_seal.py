from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.comm.seal import Seal, SealError
from smdistributed.modelparallel.common.comm.transport import Transport
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.groups import CommGroup, RankType
from smdistributed.modelparallel.common.topology import Topology


@pytest.mark.parametrize("secret", [None, "", "s", "long" * 100])
@pytest.mark.parametrize("payload", [b"", b"x", b"y" * 100_000])
def test_what_is_sealed_can_be_opened(secret: str | None, payload: bytes) -> None:
    message = Seal(secret).close(payload, 1, 2)
    assert bytes(Seal(secret).open(bytearray(message), 1, 2)) == payload


@pytest.mark.parametrize(
    ("sealed", "opened", "text"),
    [
        (("a", 1, 2), ("b", 1, 2), "another SMP_JOB_SECRET, or changed"),
        (("a", 1, 2), ("a", 0, 2), "another SMP_JOB_SECRET, or changed"),
        (("a", 1, 2), ("a", 1, 3), "another SMP_JOB_SECRET, or changed"),
        ((None, 1, 2), ("a", 1, 2), "without a secret"),
        (("a", 1, 2), (None, 1, 2), "with a secret"),
    ],
)
def test_what_another_job_sealed_cannot(
    sealed: tuple[Any, int, int], opened: tuple[Any, int, int], text: str
) -> None:
    message = Seal(sealed[0]).close(b"payload", *sealed[1:])
    with pytest.raises(SealError, match=text):
        Seal(opened[0]).open(message, *opened[1:])


@pytest.mark.parametrize("message", [b"", b"\0", b"\1", b"\1short", b"\2" + b"x" * 40])
def test_what_is_no_message_cannot(message: bytes) -> None:
    with pytest.raises(SealError):
        Seal("a").open(message, 0, 0)


def test_a_changed_message_cannot() -> None:
    message = bytearray(Seal("a").close(b"payload", 0, 0))
    message[-1] ^= 1
    with pytest.raises(SealError):
        Seal("a").open(message, 0, 0)


class _Wire(Transport):
    """Rank 0 of two; rank 1 has sent one message."""

    rank, size, local_rank, local_size = 0, 2, 0, 2
    is_one_machine = True
    largest_alone = 1 << 20

    def __init__(self, arriving: bytes) -> None:
        super().__init__()
        self._arriving = arriving
        self.sent: list[bytes] = []

    def post(self, payload: bytes, destinations: Sequence[int], channel: int) -> _Wire:
        self.sent.append(payload)
        return self

    def wait(self, timeout_seconds: float) -> None:
        pass

    def receive(
        self, sources: Sequence[int], channel: int, timeout_seconds: float
    ) -> list[bytes | bytearray]:
        return [self._arriving]

    def report(self, words: bytes) -> None:
        pass

    def close(self, release: Callable[[], None], last_words: bytes = b"") -> None:
        release()


class _Trap:
    """Its pickle does something when it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_sprung.append, (1,))


_sprung: list[int] = []


@pytest.mark.parametrize("stranger", [Seal(None), Seal("theirs")])
def test_nothing_of_a_stranger_is_unpickled(stranger: Seal) -> None:
    for channel, receive in (
        (0, lambda comm: comm.recv_from(1, RankType.WORLD_RANK)),
        (1, lambda comm: comm.allgather("ours", CommGroup.WORLD)),
    ):
        wire = _Wire(stranger.close(pickle.dumps(_Trap()), 1, channel))
        communicator = Communicator(wire, Topology(2), 5.0, seal=Seal("ours"))
        with pytest.raises(CommError, match=r"from rank 1 was .* It was not read\. Give all"):
            receive(communicator)
    assert not _sprung


def test_the_secret_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_JOB_SECRET", "ours")
    wire = _Wire(b"")
    Communicator(wire, Topology(2), 5.0).send("x", 1, RankType.WORLD_RANK)
    assert bytes(Seal("ours").open(wire.sent[0], 0, 0)) == pickle.dumps("x")
