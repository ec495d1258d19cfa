from __future__ import annotations

import pytest
from torch import nn

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.torch.building.manual_partition import ManualPartitions


def test_the_innermost_context_wins_and_outside_nothing_is_fixed() -> None:
    partitions = ManualPartitions(3, is_used=True)
    init = nn.Module.__init__
    model = nn.Sequential(nn.Linear(1, 1))
    with partitions.creating(1):
        model.append(nn.Linear(1, 1))
        with partitions.creating(2):
            model.append(nn.Linear(1, 1))
        model.append(nn.Linear(1, 1))
    model.append(nn.Linear(1, 1))
    assert partitions.of(model) == {model[1]: 1, model[2]: 2, model[3]: 1}
    assert nn.Module.__init__ is init


def test_set_covers_everything_below_and_the_last_one_wins() -> None:
    partitions = ManualPartitions(2, is_used=True)
    inner = nn.Sequential(nn.Linear(1, 1))
    model = nn.Sequential(inner, nn.Linear(1, 1))
    partitions.set(inner, 1)
    assert partitions.of(model) == {inner: 1, inner[0]: 1}
    partitions.set(model, 0)
    assert set(partitions.of(model).values()) == {0}


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_out_of_range(index: int) -> None:
    partitions = ManualPartitions(2, is_used=True)
    with pytest.raises(PartitionError, match=rf"0 \.\. 1 .* received {index}"):
        partitions.set(nn.Linear(1, 1), index)
    with pytest.raises(PartitionError), partitions.creating(index):
        pass


def test_the_context_ends_when_its_body_fails() -> None:
    partitions = ManualPartitions(2, is_used=True)
    init = nn.Module.__init__
    with pytest.raises(KeyError), partitions.creating(1):
        raise KeyError
    assert nn.Module.__init__ is init


def test_automatic_partitioning_ignores_what_is_fixed() -> None:
    partitions = ManualPartitions(2, is_used=False)
    with partitions.creating(9):
        model = nn.Linear(1, 1)
    partitions.set(model, 9)
    assert partitions.of(model) == {}
