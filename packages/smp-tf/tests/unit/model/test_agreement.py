"""What processes of a pipeline must have alike is told by what differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.common.errors import CommError, PartitionError
from smdistributed.modelparallel.tensorflow.model.agreement import agree


def _runtime(answer: Any) -> Any:
    """Returns a runtime of rank 4, whose pipeline has rank 5 as well."""
    communicator = SimpleNamespace(allgather=lambda own, group: answer(own))
    return SimpleNamespace(communicator=communicator, pipeline_ranks=[4, 5])


def _agree(answer: Any) -> None:
    agree(_runtime(answer), "net", [tf.ones([2, 3])], "abc")


def test_equal_graphs_are_right() -> None:
    _agree(lambda own: [own, own])


def test_operations_that_differ_are_told_with_the_rank() -> None:
    with pytest.raises(PartitionError, match="operations of net differ between rank 4 and rank 5"):
        _agree(lambda own: [own, (own[0], "other")])


def test_batches_that_differ_are_told_before_operations() -> None:
    with pytest.raises(PartitionError, match=r"of \(2, 3\) float32 on rank 4, of \(1,\) int32 on"):
        _agree(lambda own: [own, ("(1,) int32", "other")])


def test_a_rank_that_makes_no_graph_may_have_another_batch() -> None:
    def fails(own: Any) -> Any:
        raise CommError("no answer.", rank=4, missing_ranks=[5])

    with pytest.raises(CommError, match=r"no answer\. .*\(2, 3\) float32; a rank whose") as caught:
        _agree(fails)
    assert caught.value.missing_ranks == (5,)
