"""Processes that torchrun started find each other, and say who does not come."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest

from smdistributed.modelparallel.common.comm.presence import Presence
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.torch.execute import peers as peers_module
from smdistributed.modelparallel.torch.execute.peers import Peers
from smdistributed.modelparallel.torch.runtime import joining
from smdistributed.modelparallel.torch.runtime.joining import meet

HERE = Presence.own()
GONE = dataclasses.replace(HERE, started="0")


class _Store:
    def __init__(self, **presences: Presence) -> None:
        self._values = {
            f"smp/presence/{name[1:]}": json.dumps(dataclasses.asdict(presence))
            for name, presence in presences.items()
        }

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def test_all_are_there() -> None:
    other = dataclasses.replace(HERE, pid=1)
    assert meet(_Store(r1=other), 0, 2, 5.0) == [HERE, other]


def test_who_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "_SAY_SECONDS", 0.5)
    with pytest.raises(
        CommError, match=r"rank 2: .*: ranks 0, 3 did not come within 1\.5"
    ) as error:
        meet(_Store(r1=HERE), 2, 4, 1.5)
    assert error.value.missing_ranks == (0, 3)
    assert capsys.readouterr().err == "smp: rank 2 waits for ranks 0, 3 to start\n"


def test_who_ended_again_is_named_at_once() -> None:
    with pytest.raises(CommError, match=r"rank 2 ended while the job started") as error:
        meet(_Store(r2=GONE), 1, 3, 60.0)
    assert error.value.missing_ranks == (2,)


class _Ends:
    """Takes the errors with which this process would end."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.has_come = threading.Event()

    def __call__(self, rank: int, error: BaseException) -> None:
        self.errors.append(error)
        self.has_come.set()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> _Ends:
    ends = _Ends()
    monkeypatch.setattr(peers_module, "leave_for_exception", ends)
    monkeypatch.setattr(peers_module, "_WATCH_SECONDS", 0.02)
    monkeypatch.setattr(peers_module, "_DONE_SECONDS", 1.0)
    return ends


def test_who_ends_while_the_others_connect_ends_them(ends: _Ends) -> None:
    with Peers(0, [HERE, GONE]).connecting():
        assert ends.has_come.wait(5)
    assert isinstance(ends.errors[0], CommError)
    assert ends.errors[0].missing_ranks == (1,)


def test_who_ends_after_all_have_connected_does_not(ends: _Ends) -> None:
    with Peers(0, [HERE, GONE]).connecting():
        assert not ends.has_come.wait(0.3)
    assert not ends.has_come.wait(1.0)


def test_who_runs_does_not(ends: _Ends) -> None:
    with Peers(0, [HERE, HERE]).connecting():
        assert not ends.has_come.wait(0.3)
