"""Transfers end when a rank has left that takes no part in them, and no sooner."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from smdistributed.modelparallel.common.comm.transport import SingleProcessTransport
from smdistributed.modelparallel.tensorflow.runtime import departures
from smdistributed.modelparallel.tensorflow.runtime.departures import Departures, last_words

GRACE_SECONDS = 5.0


class Hearing(SingleProcessTransport):
    """A transport on which ranks have left."""

    def __init__(self, said: Mapping[int, bytes]) -> None:
        super().__init__()
        self.said = said

    def farewells(self) -> Mapping[int, bytes]:
        """Returns their last words."""
        return self.said


@pytest.mark.parametrize(
    ("rank", "left_at", "num_steps", "is_ended"),
    [
        (1, 3, 4, True),
        (1, 3, 3, False),  # it took part in all that began here
        (1, 3, 2, False),
        (2, 3, 4, False),  # of another pipeline
    ],
)
def test_what_waits_for_a_rank_that_left_ends(
    monkeypatch: pytest.MonkeyPatch, rank: int, left_at: int, num_steps: int, is_ended: bool
) -> None:
    ended: list[str] = []
    seconds = [100.0]
    monkeypatch.setattr(departures.processes, "end_collectives", ended.append)
    monkeypatch.setattr(departures.time, "monotonic", lambda: seconds[0])
    watched = Departures(Hearing({rank: last_words(left_at)}), {1}, lambda: num_steps)
    watched.check()
    seconds[0] += GRACE_SECONDS
    watched.check()
    assert not ended, "what it sent may still be on its way"
    for _ in range(2):
        seconds[0] += 1.0
        watched.check()
    assert ended == (["smp: rank 1 has left the job, with its side of all transfers."] * is_ended)
