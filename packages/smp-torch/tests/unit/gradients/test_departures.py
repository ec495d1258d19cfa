"""The order in which buckets leave."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.gradients.buckets import Bucket, make_buckets
from smdistributed.modelparallel.torch.gradients.departures import Departures, Foreseen


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    """Four, of which each has a bucket of its own; the last leaves first."""
    return [nn.Parameter(torch.zeros(64)) for _ in range(4)]


@pytest.fixture
def buckets(parameters: list[nn.Parameter]) -> list[Bucket]:
    return make_buckets(parameters, 256)


def test_a_bucket_waits_for_those_before_it(
    parameters: list[nn.Parameter], buckets: list[Bucket]
) -> None:
    departures = Departures(buckets)
    assert list(departures.finish(parameters[2])) == []
    assert list(departures.finish(parameters[3])) == buckets[:2]
    assert list(departures.finish(parameters[3])) == []
    assert list(departures.finish(nn.Parameter(torch.zeros(1)))) == []
    assert [departures.is_final(each) for each in parameters] == [False, False, True, True]
    assert list(departures.finish_all()) == buckets[2:]
    assert all(map(departures.is_final, parameters))


def test_it_is_foreseen_for_gradients_that_a_pass_completes_at_once(
    parameters: list[nn.Parameter], buckets: list[Bucket]
) -> None:
    twice = parameters[2]
    foreseen = Foreseen(Departures(buckets), {*parameters}, lambda each: each is not twice)
    foreseen.enter_pass({parameters[3]})
    assert [foreseen.added(each) for each in reversed(parameters)] == [True, False, False, False]
    foreseen.enter_pass({twice})
    assert not foreseen.added(twice)
    foreseen.enter_last_pass()  # and with it the pass before is over
    assert [foreseen.added(parameters[place]) for place in (1, 0)] == [True, True]
