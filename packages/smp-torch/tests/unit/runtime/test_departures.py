"""Who has left without an exchange that this process waits in, and who has not."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from smdistributed.modelparallel.common.comm.presence import Presence
from smdistributed.modelparallel.common.comm.transport import SingleProcessTransport
from smdistributed.modelparallel.common.errors import CommError, SMPError
from smdistributed.modelparallel.torch.execute.peers import Peers
from smdistributed.modelparallel.torch.runtime import departures as departures_module
from smdistributed.modelparallel.torch.runtime.departures import Departures, last_words

ALL = (0, 1, 2)


class Said(SingleProcessTransport):
    """Peers that have said farewell, or reported."""

    def __init__(
        self, words: Mapping[int, bytes], reported: Mapping[int, bytes] | None = None
    ) -> None:
        super().__init__()
        self.words, self.asked = words, 0
        self.reported, self.own = reported or {}, b""

    def report(self, words: bytes) -> None:
        self.own = words

    def reports(self) -> Mapping[int, bytes]:
        return self.reported

    def farewells(self) -> Mapping[int, bytes]:
        self.asked += 1
        return self.words


def found(
    words: Mapping[int, bytes], ranks: tuple[int, ...] = ALL
) -> tuple[list[BaseException], int]:
    """Returns the errors, and how often farewells were asked for, in a second exchange."""
    peers, errors, transport = Peers(0, [Presence.own()] * 3), [], Said(words)
    departures = Departures(0, transport, peers, lambda _, error: errors.append(error))
    with peers.blaming(ranks, "reducing gradients with"):
        pass
    with peers.blaming(ranks, "reducing gradients with"):
        departures.check()
    return errors, transport.asked


@pytest.fixture(autouse=True)
def overdue_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures_module, "_OVERDUE_SECONDS", 0.0)


def test_who_left_without_the_exchange_is_named() -> None:
    (error,), _ = found({1: last_words({ALL: 1, (1, 2): 7})})
    assert isinstance(error, CommError)
    assert error.missing_ranks == (1,)
    assert str(error).startswith(
        "rank 0: reducing gradients with ranks 1-2 failed: rank 1 has ended without it."
    )
    (error,), _ = found({1: last_words({})})
    assert error.missing_ranks == (1,)


def test_who_took_part_before_it_left_is_no_reason_to_end() -> None:
    assert found({1: last_words({ALL: 2})})[0] == []  # rank 2 is awaited


def test_messages_between_two_are_no_exchanges_of_a_group() -> None:
    assert found({1: last_words({})}, (1,)) == ([], 0)


def test_nobody_is_asked_for_while_exchanges_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures_module, "_OVERDUE_SECONDS", 60.0)
    assert found({1: last_words({})}) == ([], 0)


def test_an_exchange_that_is_over_is_not_waited_in() -> None:
    peers = Peers(0, [Presence.own()] * 3)
    with pytest.raises(ValueError, match="theirs"), peers.blaming(ALL, "joining"):
        raise ValueError("theirs")
    assert peers.inside() == []
    assert peers.entered == {ALL: 1}


def test_the_watch_ends_and_leaves_the_last_words() -> None:
    peers = Peers(0, [Presence.own()] * 3)
    departures = Departures(0, Said({}), peers)
    departures.start()
    with peers.blaming([0, 2], "joining"):
        pass
    assert json.loads(departures.stop()) == [[[0, 2], 1]]


@pytest.mark.parametrize("ranks", [ALL, (1,)])
def test_what_a_rank_reports_ends_whoever_waits(ranks: tuple[int, ...]) -> None:
    peers, errors = Peers(0, [Presence.own()] * 3), list[BaseException]()
    said = Said({}, {2: b"ValueError: a large number"})
    departures = Departures(0, said, peers, lambda _, error: errors.append(error))
    departures.check()
    assert errors == []  # nobody waits
    with peers.blaming(ranks, "receiving from"):
        departures.check()
    (error,) = errors
    assert isinstance(error, CommError)
    assert error.missing_ranks == (2,)
    assert str(error).endswith("the step has failed on rank 2: ValueError: a large number")


def test_who_has_failed_within_a_step_takes_no_other() -> None:
    said = Said({})
    departures = Departures(0, said, Peers(0, [Presence.own()] * 3))
    departures.check_intact()
    departures.report(ValueError("much " * 1000))
    assert len(said.own) < 1300
    with pytest.raises(SMPError, match=r"no step can follow.*ValueError: much"):
        departures.check_intact()


def test_who_has_failed_because_of_others_does_not_report() -> None:
    said = Said({})
    departures = Departures(0, said, Peers(0, [Presence.own()] * 3))
    departures.report(CommError("rank 1 is gone", rank=0, missing_ranks=[1]))
    assert said.own == b""
