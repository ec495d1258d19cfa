"""Transfers end when this process has waited too long for one, and no sooner."""

from __future__ import annotations

import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.whereabouts import Activity
from smdistributed.modelparallel.tensorflow.execute.links import explained, waited_too_long
from smdistributed.modelparallel.tensorflow.execute.waits import Waits
from smdistributed.modelparallel.tensorflow.runtime import overdue
from smdistributed.modelparallel.tensorflow.runtime.overdue import Overdue

TIMEOUT_SECONDS = 5.0


class Job:
    """A process whose clock and transfers a test moves, of four."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        self.ended: list[tuple[str, bool]] = []
        monkeypatch.setattr(overdue.time, "monotonic", lambda: self.seconds)
        monkeypatch.setattr(
            overdue.processes,
            "end_collectives",
            lambda message, is_late: self.ended.append((message, is_late)),
        )
        self.waits = Waits(4)
        self.watched = Overdue(0, self.waits, TIMEOUT_SECONDS)

    def wait(self, seconds: float) -> None:
        """Lets the thread of the library look each second."""
        for _ in range(round(seconds)):
            self.seconds += 1.0
            self.watched.check()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def begin(job: Job, *peers: int) -> None:
    """Begins a transfer that does not end."""

    def fail() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        job.waits.counted(peers, [], fail)


def test_a_transfer_that_does_not_end_ends_all(job: Job) -> None:
    begin(job, 1, 3)
    job.wait(TIMEOUT_SECONDS)
    assert not job.ended
    job.wait(2)
    message = "smp: rank 0 has waited too long for rank 1, 3 (communication_timeout)."
    assert job.ended == [(message, True)], "once"


def test_who_asks_is_told_whom_transfers_wait_for(job: Job) -> None:
    assert job.watched.activities() == []
    begin(job, 1, 3)
    assert [each.what for each in job.watched.activities()] == ["transfers with ranks 1, 3"]
    job.wait(3)
    assert job.watched.activities() == [Activity("transfers with ranks 1, 3", 3.0)]
    job.waits.counted([2], [], lambda: tf.constant(0))
    assert [each.seconds for each in job.watched.activities()] == [0.0]


def test_what_ends_meanwhile_counts(job: Job) -> None:
    begin(job, 1)
    for _ in range(4):
        job.wait(TIMEOUT_SECONDS - 1)
        job.waits.counted([2], [], lambda: tf.constant(0))
    assert not job.ended


def test_without_transfers_nothing_is_waited_for(job: Job) -> None:
    job.wait(3 * TIMEOUT_SECONDS)
    job.waits.counted([1], [], lambda: tf.constant(0))
    job.wait(3 * TIMEOUT_SECONDS)
    begin(job, 1)
    job.wait(TIMEOUT_SECONDS - 1)
    assert not job.ended


def test_transfers_of_graphs_count_when_they_take_place() -> None:
    waits = Waits(2)
    queue = tf.queue.FIFOQueue(4, [tf.float32])

    @tf.function(autograph=False)
    def twice() -> None:
        for _ in range(2):
            waits.counted([1], [], queue.dequeue)

    twice.get_concrete_function()
    assert (waits.num_ended(), waits.awaited()) == (0, [])
    queue.enqueue_many([[0.0, 0.0]])
    twice()
    assert (waits.num_ended(), waits.awaited()) == (2, [])
    queue.enqueue(0.0)
    queue.close()
    with pytest.raises(tf.errors.OutOfRangeError):
        twice()
    assert waits.awaited() == [1]


@pytest.mark.parametrize(
    ("rank", "says", "missing"),
    [
        (0, "ranks 1, 3 did not answer in time", (1, 3)),
        (1, "it did not come to one with rank 0 in time", ()),
        (2, "ranks 1, 3 did not answer in time", (1, 3)),
    ],
)
def test_every_rank_learns_who_was_waited_for(
    monkeypatch: pytest.MonkeyPatch, rank: int, says: str, missing: tuple[int, ...]
) -> None:
    monkeypatch.setattr(overdue.processes, "silent_processes", lambda ranks, seconds: [])
    text = f"Collective ops is aborted by: {waited_too_long(0, [1, 3])} [[node smp_from_rank_1]]"
    found = explained(tf.errors.DeadlineExceededError(None, None, text), rank, 4)
    assert found is not None
    assert says in str(found)
    assert tuple(found.missing_ranks) == missing
